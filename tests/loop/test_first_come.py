"""Batches of the groups that are done first: what a step takes, that none is lost, and the length bias."""

import asyncio
import heapq
from collections import Counter
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_dist.data.order import Curriculum
from grpo_dist.data.stream import PromptStream
from grpo_dist.driver import run
from grpo_dist.loop.first_come import PIPELINES, FirstCome, Launch, Launches, LengthBias, choice
from grpo_dist.loop.pipeline import Admission
from grpo_dist.runs.checkpoint import Checkpoints, load_progress, load_state
from grpo_dist.types import Group, Rollout, TeacherLogprobs
from tests.support import fakes
from tests.support.made_groups import group_of
from tests.support.tiers import slow_after


class Timed(fakes.World):
    """Samples take as long as they are: the shortest of what is in flight is always done first.

    ``length``: tokens of the samples of a prompt. ``silent``: prompts whose rewards do not differ.
    """

    def __init__(self, length, silent=()):
        super().__init__(jitter=False)
        self._length, self._silent = length, set(silent)
        self._waiting, self._ties, self._now = [], count(), 0
        self.launched: list[tuple[str, int]] = []  # and the length

    async def sample(self, prompt, *, seeds, sampling):
        length, woken = self._length(prompt.uid), asyncio.Event()
        self.launched.append((prompt.uid, length))
        entry = (self._now + length, next(self._ties), woken)
        heapq.heappush(self._waiting, entry)
        asyncio.get_running_loop().call_later(0.002, self._wake)
        try:
            await woken.wait()
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
                heapq.heapify(self._waiting)
            raise
        return tuple(
            Rollout(prompt.uid, i, np.full(length, 3, np.int32), np.full(length, -1, np.float32), "stop", "x",
                    np.full(length, self.version, np.int32), temperature=1.0, max_new_tokens=100)
            for i in range(len(seeds))
        )  # fmt: skip

    def _wake(self):
        if self._waiting:
            self._now, _, woken = heapq.heappop(self._waiting)
            woken.set()

    async def score(self, prompt, rollouts):
        rewards = np.arange(len(rollouts), dtype=np.float32) * (prompt.uid not in self._silent)
        return Group(prompt, rollouts, rewards, {"fake": rewards}, ("correct",) * len(rollouts))


def train(world, config, prompts, **kwargs):
    asyncio.run(run(config, world.workers(config.needs_reference), prompts, [], world, world, **kwargs))


def finished(**changes):
    own = {"order": "completion", "prompts_per_step": 4, "samples_per_prompt": 2} | changes.pop("batch", {})
    base = {"max_staleness": 2, "weight_sync": {"mode": "keep"}, "sampling": {"max_new_tokens": 100}}
    return fakes.config(batch=own, **(base | changes))


def by_number(uid):
    """Every fourth prompt has answers of 40 tokens, the others of 4 to 8."""
    number = int(uid[1:])
    return 40 if number % 4 == 0 else 4 + number % 5


def trained(world):
    return [
        [uid for own in world.ledger_entries[s].values() for uid in own] for s in sorted(world.ledger_entries)
    ]


# --- which groups a step takes


@pytest.mark.parametrize(
    ("deadlines", "done", "expected"),
    [
        ({"a": 0, "b": 1, "c": 1, "d": 1}, "dc", None),  # a must be trained now
        ({"a": 0, "b": 1, "c": 1, "d": 1}, "dca", "ad"),
        ({"a": 2, "b": 2, "c": 2, "d": 2}, "db", "db"),  # nothing is due
        ({"a": 2, "b": 2, "c": 2}, "b", None),
        # Three are due by step 1, which has place for two: one of them goes now, the one done first.
        ({"a": 1, "b": 1, "c": 1, "d": 2, "e": 2}, "edcb", "ce"),
        ({"a": 1, "b": 1, "c": 1, "d": 2, "e": 2}, "ed", None),
    ],
)
def test_the_choice_by_hand(deadlines, done, expected):
    assert choice(deadlines, done, step=0, size=2) == (None if expected is None else [*expected])


def by_definition(deadlines, done, *, step, size):
    """`choice` as its docstring puts it: for each deadline, all groups are looked at."""
    if len(done) < size:
        return None
    chosen = []
    for last in sorted(set(deadlines.values())):
        due = sum(own <= last for own in deadlines.values())
        need = due - size * (last - step) - sum(deadlines[uid] <= last for uid in chosen)
        ready = [uid for uid in done if deadlines[uid] <= last and uid not in chosen]
        if need > len(ready):
            return None
        chosen += ready[: max(need, 0)]
    return [*chosen, *[uid for uid in done if uid not in chosen][: size - len(chosen)]]


@st.composite
def on_their_way(draw):
    """Size of a step, staleness, and groups in any order: (step that it was launched for, when it is done or
    None, whether it has no signal), so that none is due later than the steps have places for.
    """
    size, staleness = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    launched = draw(st.lists(st.integers(-staleness, 0), max_size=size * (staleness + 1)))
    launched = [own for i, own in enumerate(sorted(launched)) if i < size * (own + staleness + 1)]
    ranks = draw(st.permutations(range(len(launched))))
    return size, staleness, [
        (own, rank if draw(st.booleans()) else None, draw(st.booleans()))
        for own, rank in zip(draw(st.permutations(launched)), ranks, strict=True)
    ]  # fmt: skip


@settings(max_examples=100)
@given(drawn=on_their_way())
def test_counts_by_deadline_say_when_a_step_is_complete_and_its_groups_are_those_of_the_definition(drawn):
    size, staleness, groups = drawn
    launches, scored = Launches(size, staleness), {}
    prompts = fakes.prompts(len(groups) + 2)
    launches.add(Launch(prompts[-1], 99, 0))
    for i, (own, _, _) in enumerate(groups):
        launches.add(Launch(prompts[i], i, own))
    launches.finish(prompts[-1].uid, object())  # it is done, and gone again
    assert launches.remove(prompts[-1].uid).index == 99
    deadlines = {prompts[i].uid: own + staleness for i, (own, _, _) in enumerate(groups)}
    done = sorted((at, i) for i, (_, at, _) in enumerate(groups) if at is not None)
    for _, i in done:
        uid, silent = prompts[i].uid, groups[i][2]
        before = [u for u in scored if not scored[u][1]] + [u for u in scored if scored[u][1]]
        expected = by_definition(deadlines, before, step=0, size=size)
        assert choice(deadlines, before, step=0, size=size) == expected
        assert launches.is_complete(0) == (expected is not None)
        assert expected is None or launches.chosen(0) == expected
        scored[uid] = object(), silent
        launches.finish(uid, scored[uid][0], silent=silent)
    if launches.is_complete(0):
        chosen = launches.chosen(0)
        taken = launches.take(set(chosen))
        assert [own.index for own, _ in taken] == sorted(int(uid[1:]) for uid in chosen)
        assert [group for _, group in taken] == [scored[own.prompt.uid][0] for own, _ in taken]
        assert len(launches) == len(groups) - size and not any(uid in launches for uid in chosen)


def test_bounds_by_hand():
    def bounds(prompts, staleness, dynamic=None, **batch):
        config = finished(max_staleness=staleness, batch=batch, dynamic_sampling=dynamic or {})
        admission = Admission.from_config(config, fakes.prompts(prompts))
        return admission.groups, admission.replacements

    def ordered(oversample):
        return {"name": "completion", "oversample": oversample}

    assert bounds(100, 1) == (6, 0) and bounds(100, 4) == (12, 0)
    assert bounds(100, 1, order=ordered(1.3)) == (6, 0) and bounds(100, 1, order=ordered(2)) == (8, 0)
    assert bounds(100, 1, prompts_per_step=50, order=ordered(1.1)) == (55, 0)  # a float product is above
    assert bounds(5, 1) == (5, 0)  # no prompt twice
    assert bounds(100, 1, {"enabled": True}) == (6, 12)
    # 6, of them 4 just trained, the 6 that these replaced, and 6 of the next step are within 20.
    assert bounds(20, 1, {"enabled": True}) == (6, 6)


# --- runs


@pytest.mark.parametrize(("staleness", "oversample"), [(1, 2.0), (2, 1.5), (3, 4.0), (4, 1.25)])
def test_no_token_is_staler_than_the_bound_and_every_prompt_is_trained_once(staleness, oversample):
    world = Timed(by_number)
    config = finished(
        steps=10, max_staleness=staleness, batch={"order": {"name": "completion", "oversample": oversample}}
    )
    train(world, config, fakes.prompts(40))
    assert Counter(uid for step in trained(world) for uid in step) == {f"p{i}": 1 for i in range(40)}
    assert [len(step) for step in trained(world)] == [4] * 10
    seen = [world.logged[s]["rollout/staleness_max"] for s in range(1, 11)]
    waited = [world.logged[s]["group/waited_steps"] for s in range(1, 11)]
    assert max(seen) <= staleness and max(waited) > 0
    assert world.logged[10]["group/carried_over"] == 0 < world.logged[1]["group/carried_over"]


def test_a_step_does_not_wait_for_a_slow_group_until_its_bound():
    """One group needs as long as all others together. In launch order it holds the first step up."""
    slow = fakes.prompts(40)[0].uid

    def steps_of(order):
        world = Timed(lambda uid: 1000 if uid == slow else 4)
        config = finished(steps=8, max_staleness=3, batch={"order": order})
        train(world, config, fakes.prompts(40))
        at = next(i for i, own in enumerate(trained(world)) if slow in own)
        begun = next(i for i, (uid, _) in enumerate(world.launched) if uid == slow) // 4
        return begun, at

    begun, at = steps_of("launched")
    assert at == begun
    begun, at = steps_of("completion")
    assert begun < at <= begun + 3


def test_a_synchronous_run_with_carry_over_trains_only_carried_groups_late():
    """All groups are launched under the weights of their step: those not carried over are on-policy."""

    class Noted(Timed):
        async def sample(self, prompt, *, seeds, sampling):
            begun[prompt.uid] = self.version, len(self.updates)
            return await super().sample(prompt, seeds=seeds, sampling=sampling)

    begun: dict[str, tuple[int, int]] = {}
    world = Noted(by_number)
    train(
        world,
        finished(steps=8, max_staleness=1, batch={"order": {"name": "completion", "oversample": 1.25}}),
        fakes.prompts(40),
    )
    assert all(version == updates for version, updates in begun.values())
    late = [step - begun[uid][0] for step, own in enumerate(trained(world)) for uid in own]
    assert set(late) == {0, 1} and sum(late) < len(late) / 4


@pytest.mark.parametrize("mode", ["keep", "drain"])
def test_weights_are_sent_by_the_mode(mode):
    world = Timed(by_number)
    train(world, finished(steps=5, weight_sync={"mode": mode}, max_staleness=1), fakes.prompts(40))
    assert world.version == 5
    for own in world.sampled_groups.values():
        for rollout in (r for group in own for r in group.rollouts):
            assert len(set(rollout.policy_versions.tolist())) == 1


def test_the_reference_is_renewed_under_groups_that_are_carried_over():
    class Refreshed(Timed):
        reference = 0.0

        async def logprobs(self, prompt, rollouts, top_k=0):
            values = [np.full(len(r.completion_ids), self.reference, np.float32) for r in rollouts]
            return list(map(TeacherLogprobs, values))

        async def refresh(self):
            self.reference -= 1.0

        def workers(self, reference=False):
            return replace(super().workers(reference=True), reference_sync=self)

    world = Refreshed(by_number)
    config = finished(
        steps=6, algorithm={"kl": {"coef": 0.1}, "skip_idle_rows": False}, reference={"refresh_every": 1}
    )
    train(world, config, fakes.prompts(40))
    for step, (batch,) in enumerate(world.updates):
        assert set(batch.policy.ref_logprobs[batch.policy.mask].tolist()) == {-float(step)}


# --- dynamic sampling


def test_groups_without_a_signal_are_replaced_and_counted_once():
    world = Timed(by_number, silent=(f"p{i}" for i in range(0, 40, 3)))
    config = finished(steps=6, dynamic_sampling={"enabled": True}, checkpoint={"every": 6})
    prompts = fakes.prompts(80)
    train(world, config, prompts)
    for step, (batch,) in enumerate(world.updates, start=1):
        assert len(batch) == 8 and batch.policy.advantages[batch.policy.mask].all()
        assert "no_signal" not in world.ledger_entries[step]
    found = Counter(uid for step in trained(world) for uid in step)
    order = world.saved[6].pipeline.order
    assert found == PromptStream(prompts, 1, seed=0, state=order).sampled() and max(found.values()) == 1
    assert sum(world.logged[s]["group/extra_prompts"] for s in range(1, 7)) == len(world.launched) - 24 > 0


def test_the_bound_on_extra_prompts_is_kept_and_a_small_data_set_is_used_up_again_and_again():
    world = Timed(by_number, silent=(f"p{i}" for i in range(10)))
    config = finished(steps=12, max_staleness=1, dynamic_sampling={"enabled": True, "max_extra_prompts": 1})
    train(world, config, fakes.prompts(10))
    extra = [world.logged[s]["group/extra_prompts"] for s in range(1, 13)]
    assert max(extra) == 1 and [len(own) for own in trained(world)] == [4 + int(e) for e in extra]
    assert all(len(set(own)) == len(own) for own in trained(world))  # none twice in a step


@pytest.mark.parametrize("order", slow_after(["epochs", "weights", "pools", "pass_rate"], 2))
def test_no_prompt_is_sampled_twice_with_the_same_seeds(order):
    """A prompt that is replaced comes up again soon: in small data, and in orders that draw some more often.
    Groups end, and are replaced, while the policy trains.
    """

    class Slow(fakes.World):
        async def update(self, *args, **kwargs):
            await asyncio.sleep(0.01)
            return await super().update(*args, **kwargs)

        async def score(self, prompt, rollouts):
            group = await super().score(prompt, rollouts)
            silent = sum(int(r.completion_ids[0]) for r in rollouts) % 4 > 0
            rewards = np.array([float(i % 2 and not silent) for i in range(len(rollouts))], np.float32)
            return replace(group, rewards=rewards)

    prompts = [replace(p, source="A" if i < 10 else "B") for i, p in enumerate(fakes.prompts(60))]
    weight = {"weight": 1.0} if order == "weights" else {}
    data = {"train": [{"path": "demo:add3", "name": name} | weight for name in "AB"]}
    data |= {"order": order} if order in ("pools", "pass_rate") else {}
    config = finished(steps=25, data=data, dynamic_sampling={"enabled": True}, weight_sync={"mode": "keep"})
    world = Slow()
    train(world, config, prompts)
    drawn = Counter((uid, seeds) for uid, seeds, _ in world.sampled)
    assert max(drawn.values()) == 1 and len({uid for uid, _ in drawn}) < len(drawn)


@pytest.mark.parametrize(("prompts", "extra"), slow_after([(8, 1), (11, 3), (12, 2), (20, 12), (27, 5)], 2))
@pytest.mark.parametrize("order", ["epochs", "pass_rate"])
def test_data_that_barely_suffice_for_what_is_on_its_way_always_have_one_more(prompts, extra, order):
    class Slow(fakes.World):
        async def update(self, *args, **kwargs):
            await asyncio.sleep(0.005)
            return await super().update(*args, **kwargs)

        async def score(self, prompt, rollouts):
            group = await super().score(prompt, rollouts)
            return replace(group, rewards=np.zeros_like(group.rewards))  # every group is replaced

    dynamic = {"enabled": True, "max_extra_prompts": extra}
    data = {"train": [{"path": "demo:add3"}], "order": order}
    batch, world = {"order": {"name": "completion", "oversample": 2.0}}, Slow()
    train(world, finished(steps=15, data=data, batch=batch, dynamic_sampling=dynamic, max_staleness=1),
          fakes.prompts(prompts))  # fmt: skip
    assert len(world.ledger_entries) == 15
    drawn = Counter((uid, seeds) for uid, seeds, _ in world.sampled)
    assert max(drawn.values()) == 1


def test_replacements_do_not_look_again_at_what_is_on_its_way(monkeypatch):
    """Epochs of a small data set: prompts come up while they are on their way, and are passed over until a
    step is taken.
    """
    looked_at, since = Counter(), Counter()  # in all, and since a step was taken

    class Counted(PromptStream):
        def take(self, batch):
            (index,) = super().take(batch)
            looked_at[index] += 1
            since[index] += 1
            assert since[index] == 1
            return [index]

        def trained(self, indices, sampled):
            super().trained(indices, sampled)
            since.clear()

    monkeypatch.setattr("grpo_dist.loop.pipeline.PromptStream", Counted)
    world = Timed(by_number, [f"p{i}" for i in range(24) if i % 4 != 1])
    train(world, finished(steps=10, max_staleness=1, dynamic_sampling={"enabled": True}), fakes.prompts(24))
    assert max(looked_at.values()) > 1 and len(world.launched) > 60


def test_an_order_that_learns_is_asked_by_step_and_not_by_group(monkeypatch):
    """All groups of a launch, and those that replace some of it, come from one draw; groups that are replaced
    between a step's end and the next launch from another, which knows that step.
    """
    asked = []
    take = Curriculum.take
    monkeypatch.setattr(Curriculum, "take", lambda self, draw: asked.append(draw) or take(self, draw))
    world = Timed(by_number, [f"p{i}" for i in range(0, 60, 4)])
    data = {"train": [{"path": "demo:add3"}], "order": "pass_rate"}
    config = finished(steps=6, data=data, dynamic_sampling={"enabled": True, "max_extra_prompts": 3})
    train(world, config, fakes.prompts(60))
    assert asked == list(range(len(asked))) and len(asked) <= 2 * 6 < len(world.launched)
    assert all(len(set(own)) == len(own) for own in trained(world))


# --- resuming


@pytest.mark.parametrize(
    ("dynamic", "order"), slow_after([(False, "epochs"), (True, "epochs"), (False, "pass_rate")], 1)
)
def test_a_resumed_run_launches_what_was_in_flight_again_and_loses_none(dynamic, order, tmp_path):
    prompts, silent = fakes.prompts(60), [f"p{i}" for i in range(0, 60, 4)] if dynamic else []
    config = finished(
        steps=10, max_staleness=3, checkpoint={"every": 3, "background": False, "keep": 9},
        data={"train": [{"path": "demo:add3"}], "order": order},
        dynamic_sampling={"enabled": True, "max_extra_prompts": 3} if dynamic else {},
    )  # fmt: skip
    entries, start, kept, worlds = {}, 0, None, []
    for end in (3, 6, 9, 10):  # killed right after each checkpoint
        world = Timed(by_number, silent)
        world.version = start
        train(world, config, prompts, progress=kept)
        entries |= {s: world.ledger_entries[s] for s in range(start + 1, end + 1)}
        worlds.append(world)
        kept = stored(world.saved[end], config, prompts, tmp_path / str(end))
        start = end
    assert kept.pipeline.order_indices == {} == kept.pipeline.partial
    uids = [[uid for own in entries[s].values() for uid in own] for s in range(1, 11)]
    assert all(len(set(own)) == len(own) for own in uids)
    if order == "epochs":
        found = Counter(uid for own in uids for uid in own)
        assert found == PromptStream(prompts, 1, seed=0, state=kept.pipeline.order).sampled()
    first, second = worlds[0].saved[3].pipeline, worlds[1]
    done = {group.prompt.uid for own in first.partial.values() for group in own}
    assert not done & {uid for uid, _ in second.launched[: len(first.order_indices)]}
    seen = [worlds[1].logged[s]["rollout/staleness_max"] for s in (4, 5, 6)]
    assert max(seen) <= 3


def stored(progress, config, prompts, directory):
    """Return ``progress`` as a checkpoint gives it back."""

    async def save():
        world = fakes.World()
        world.saved = lambda: asyncio.sleep(0)
        world.save = lambda path, **_: asyncio.to_thread(path.mkdir)
        await Checkpoints(directory, config, prompts).save(progress.step, world.workers(), progress)

    asyncio.run(save())
    (checkpoint,) = directory.glob("step_*")
    return load_progress(checkpoint, load_state(checkpoint, config), prompts)


# --- the bias toward short answers


def mean(values):
    return sum(values) / len(values)


def test_the_bias_by_hand():
    bias = LengthBias({})
    of = lambda *lengths: group_of([0] * len(lengths), lengths)  # noqa: E731
    bias.trained([(0, of(2, 4))])
    assert bias.settle({0}) is None  # another group of launch 0 is on its way
    bias.trained([(0, of(9)), (1, of(1, 3))])
    assert bias.settle({1}) == pytest.approx(19 / 5 / 5 - 1)  # as in the module's picture
    again = LengthBias(bias.state)
    again.trained([(1, of(26))])
    assert again.settle(set()) == pytest.approx(0.0)


def test_carrying_over_leaves_no_length_bias_and_dropping_does(monkeypatch):
    """Lengths 4 to 8 and, of a quarter of the prompts, 40. Both runs take the four groups of six that are
    done first; one leaves the others in flight, the other cancels them.
    """

    class Dropping(FirstCome):
        async def next(self, **kwargs):
            batch = await super().next(**kwargs)
            for task in self._running:
                task.cancel()
            self._launches = Launches(self._per_step, self._max_staleness)
            self._order_indices = {}
            return batch

    def bias_of(kind):
        world = Timed(by_number)
        monkeypatch.setitem(PIPELINES, "completion", kind)
        config = finished(
            steps=30, max_staleness=1, batch={"order": {"name": "completion", "oversample": 1.5}}
        )
        train(world, config, fakes.prompts(400))
        lengths = dict(world.launched)
        taken = [lengths[uid] for step in trained(world) for uid in step]
        return mean(taken) / mean([length for _, length in world.launched]) - 1.0, world.logged

    carried, logged = bias_of(FirstCome)
    assert carried == 0.0  # every launched group is trained
    assert logged[30]["rollout/length_bias"] == pytest.approx(0.0, abs=1e-12)
    early = [logged[s]["rollout/length_bias"] for s in (3, 4, 5)]
    assert min(early) < -0.02  # while long answers are on their way, the run says so
    assert abs(logged[29]["rollout/length_bias"]) < 0.05
    dropped, _ = bias_of(Dropping)
    assert dropped < -0.4
