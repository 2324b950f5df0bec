"""Batches in completion order: what a step takes, that no group is lost, and the length bias."""

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
    """Sampling time is proportional to length: the shortest samples in flight are done first.

    ``length``: tokens of the samples of a prompt. ``silent``: prompts of zero-variance groups.
    """

    def __init__(self, length, silent=()):
        super().__init__(jitter=False)
        self._length, self._silent = length, set(silent)
        self._waiting, self._ties, self._now = [], count(), 0
        self.launched: list[tuple[str, int]] = []  # uid and length

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


def new_config(**changes):
    batch = {"order": "completion", "prompts_per_step": 4, "samples_per_prompt": 2} | changes.pop("batch", {})
    base = {"max_staleness": 2, "weight_sync": {"mode": "keep"}, "sampling": {"max_new_tokens": 100}}
    return fakes.config(batch=batch, **(base | changes))


def mixed_length(uid):
    """Return 40 tokens for every fourth prompt, 4 to 8 for the others."""
    number = int(uid[1:])
    return 40 if number % 4 == 0 else 4 + number % 5


def step_uids(world):
    entries = [world.ledger_entries[step] for step in sorted(world.ledger_entries)]
    return [[uid for uids in entry.values() for uid in uids] for entry in entries]


# --- which groups a step takes


@pytest.mark.parametrize(
    ("deadlines", "done", "expected"),
    [
        ({"a": 0, "b": 1, "c": 1, "d": 1}, "dc", None),  # a is due now
        ({"a": 0, "b": 1, "c": 1, "d": 1}, "dca", "ad"),
        ({"a": 2, "b": 2, "c": 2, "d": 2}, "db", "db"),  # nothing is due
        ({"a": 2, "b": 2, "c": 2}, "b", None),
        # Three are due by step 1, which has room for two: the first of them to finish is trained now.
        ({"a": 1, "b": 1, "c": 1, "d": 2, "e": 2}, "edcb", "ce"),
        ({"a": 1, "b": 1, "c": 1, "d": 2, "e": 2}, "ed", None),
    ],
)
def test_the_choice_by_hand(deadlines, done, expected):
    assert choice(deadlines, done, step=0, size=2) == (None if expected is None else [*expected])


def choice_defined(deadlines, done, *, step, size):
    """Implement `choice` by its docstring: visit all groups for each deadline."""
    if len(done) < size:
        return None
    chosen = []
    for last in sorted(set(deadlines.values())):
        due = sum(deadline <= last for deadline in deadlines.values())
        need = due - size * (last - step) - sum(deadlines[uid] <= last for uid in chosen)
        ready = [uid for uid in done if deadlines[uid] <= last and uid not in chosen]
        if need > len(ready):
            return None
        chosen += ready[: max(need, 0)]
    return [*chosen, *[uid for uid in done if uid not in chosen][: size - len(chosen)]]


@st.composite
def any_in_flight(draw):
    """Draw the size of a step, the staleness, and groups in any order as (launch step, time when done or
    None, zero-variance), none of them due when no step has room.
    """
    size, staleness = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    launch_steps = draw(st.lists(st.integers(-staleness, 0), max_size=size * (staleness + 1)))
    launch_steps = [step for i, step in enumerate(sorted(launch_steps)) if i < size * (step + staleness + 1)]
    ranks = draw(st.permutations(range(len(launch_steps))))
    return size, staleness, [
        (step, rank if draw(st.booleans()) else None, draw(st.booleans()))
        for step, rank in zip(draw(st.permutations(launch_steps)), ranks, strict=True)
    ]  # fmt: skip


@settings(max_examples=100)
@given(case=any_in_flight())
def test_counts_by_deadline_say_when_a_step_is_complete_and_its_groups_are_those_of_the_definition(case):
    size, staleness, groups = case
    launches, scored = Launches(size, staleness), {}
    prompts = fakes.prompts(len(groups) + 2)
    launches.add(Launch(prompts[-1], 99, 0))
    for i, (step, _, _) in enumerate(groups):
        launches.add(Launch(prompts[i], i, step))
    launches.finish(prompts[-1].uid, object())  # done, and removed again
    assert launches.remove(prompts[-1].uid).index == 99
    deadlines = {prompts[i].uid: step + staleness for i, (step, _, _) in enumerate(groups)}
    done = sorted((done_at, i) for i, (_, done_at, _) in enumerate(groups) if done_at is not None)
    for _, i in done:
        uid, silent = prompts[i].uid, groups[i][2]
        done_so_far = [u for u in scored if not scored[u][1]] + [u for u in scored if scored[u][1]]
        expected = choice_defined(deadlines, done_so_far, step=0, size=size)
        assert choice(deadlines, done_so_far, step=0, size=size) == expected
        assert launches.is_complete(0) == (expected is not None)
        assert expected is None or launches.chosen(0) == expected
        scored[uid] = object(), silent
        launches.finish(uid, scored[uid][0], silent=silent)
    if launches.is_complete(0):
        chosen = launches.chosen(0)
        pairs = launches.take(set(chosen))
        assert [launch.index for launch, _ in pairs] == sorted(int(uid[1:]) for uid in chosen)
        assert [group for _, group in pairs] == [scored[launch.prompt.uid][0] for launch, _ in pairs]
        assert len(launches) == len(groups) - size and not any(uid in launches for uid in chosen)


def test_bounds_by_hand():
    def bounds(prompts, staleness, dynamic=None, **batch):
        config = new_config(max_staleness=staleness, batch=batch, dynamic_sampling=dynamic or {})
        admission = Admission.from_config(config, fakes.prompts(prompts))
        return admission.groups, admission.replacements

    def ordered(oversample):
        return {"name": "completion", "oversample": oversample}

    assert bounds(100, 1) == (6, 0) and bounds(100, 4) == (12, 0)
    assert bounds(100, 1, order=ordered(1.3)) == (6, 0) and bounds(100, 1, order=ordered(2)) == (8, 0)
    assert bounds(100, 1, prompts_per_step=50, order=ordered(1.1)) == (55, 0)  # a float product is above
    assert bounds(5, 1) == (5, 0)  # no prompt twice
    assert bounds(100, 1, {"enabled": True}) == (6, 12)
    # 6 in flight (4 just trained), the 6 that these replaced, and 6 of the next step are within 20.
    assert bounds(20, 1, {"enabled": True}) == (6, 6)


# --- runs


@pytest.mark.parametrize(("staleness", "oversample"), [(1, 2.0), (2, 1.5), (3, 4.0), (4, 1.25)])
def test_no_token_is_staler_than_the_bound_and_every_prompt_is_trained_once(staleness, oversample):
    world = Timed(mixed_length)
    config = new_config(
        steps=10, max_staleness=staleness, batch={"order": {"name": "completion", "oversample": oversample}}
    )
    train(world, config, fakes.prompts(40))
    assert Counter(uid for step in step_uids(world) for uid in step) == {f"p{i}": 1 for i in range(40)}
    assert [len(step) for step in step_uids(world)] == [4] * 10
    staleness_max = [world.logged[s]["rollout/staleness_max"] for s in range(1, 11)]
    waited = [world.logged[s]["group/waited_steps"] for s in range(1, 11)]
    assert max(staleness_max) <= staleness and max(waited) > 0
    assert world.logged[10]["group/carried_over"] == 0 < world.logged[1]["group/carried_over"]


def test_a_step_does_not_wait_for_a_slow_group_until_its_bound():
    """One group takes as long as all others together. In launch order it delays its step."""
    slow = fakes.prompts(40)[0].uid

    def steps_of(order):
        world = Timed(lambda uid: 1000 if uid == slow else 4)
        config = new_config(steps=8, max_staleness=3, batch={"order": order})
        train(world, config, fakes.prompts(40))
        trained_step = next(i for i, uids in enumerate(step_uids(world)) if slow in uids)
        launch_step = next(i for i, (uid, _) in enumerate(world.launched) if uid == slow) // 4
        return launch_step, trained_step

    launch_step, trained_step = steps_of("launched")
    assert trained_step == launch_step
    launch_step, trained_step = steps_of("completion")
    assert launch_step < trained_step <= launch_step + 3


def test_a_synchronous_run_with_carry_over_trains_only_carried_groups_late():
    """All groups are launched with the weights of their step: groups not carried over are on-policy."""

    class Recording(Timed):
        async def sample(self, prompt, *, seeds, sampling):
            launch_versions[prompt.uid] = self.version, len(self.updates)
            return await super().sample(prompt, seeds=seeds, sampling=sampling)

    launch_versions: dict[str, tuple[int, int]] = {}
    world = Recording(mixed_length)
    batch = {"order": {"name": "completion", "oversample": 1.25}}
    train(world, new_config(steps=8, max_staleness=1, batch=batch), fakes.prompts(40))
    assert all(version == updates for version, updates in launch_versions.values())
    late = [step - launch_versions[uid][0] for step, uids in enumerate(step_uids(world)) for uid in uids]
    assert set(late) == {0, 1} and sum(late) < len(late) / 4


@pytest.mark.parametrize("mode", ["keep", "drain"])
def test_weights_are_sent_by_the_mode(mode):
    world = Timed(mixed_length)
    train(world, new_config(steps=5, weight_sync={"mode": mode}, max_staleness=1), fakes.prompts(40))
    assert world.version == 5
    for groups in world.sampled_groups.values():
        for rollout in (r for group in groups for r in group.rollouts):
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

    world = Refreshed(mixed_length)
    config = new_config(
        steps=6, algorithm={"kl": {"coef": 0.1}, "skip_idle_rows": False}, reference={"refresh_every": 1}
    )
    train(world, config, fakes.prompts(40))
    for step, (batch,) in enumerate(world.updates):
        assert set(batch.policy.ref_logprobs[batch.policy.mask].tolist()) == {-float(step)}


# --- dynamic sampling


def test_groups_without_a_signal_are_replaced_and_counted_once():
    world = Timed(mixed_length, silent=(f"p{i}" for i in range(0, 40, 3)))
    config = new_config(steps=6, dynamic_sampling={"enabled": True}, checkpoint={"every": 6})
    prompts = fakes.prompts(80)
    train(world, config, prompts)
    for step, (batch,) in enumerate(world.updates, start=1):
        assert len(batch) == 8 and batch.policy.advantages[batch.policy.mask].all()
        assert "no_signal" not in world.ledger_entries[step]
    counts = Counter(uid for step in step_uids(world) for uid in step)
    order = world.saved[6].pipeline.order
    assert counts == PromptStream(prompts, 1, seed=0, state=order).sampled() and max(counts.values()) == 1
    assert sum(world.logged[s]["group/extra_prompts"] for s in range(1, 7)) == len(world.launched) - 24 > 0


def test_the_bound_on_extra_prompts_is_kept_and_a_small_data_set_is_used_up_again_and_again():
    world = Timed(mixed_length, silent=(f"p{i}" for i in range(10)))
    config = new_config(steps=12, max_staleness=1, dynamic_sampling={"enabled": True, "max_extra_prompts": 1})
    train(world, config, fakes.prompts(10))
    extra = [world.logged[s]["group/extra_prompts"] for s in range(1, 13)]
    assert max(extra) == 1 and [len(uids) for uids in step_uids(world)] == [4 + int(e) for e in extra]
    assert all(len(set(uids)) == len(uids) for uids in step_uids(world))  # none twice in a step


@pytest.mark.parametrize("order", slow_after(["epochs", "weights", "pools", "pass_rate"], 2))
def test_no_prompt_is_sampled_twice_with_the_same_seeds(order):
    """A replaced prompt soon recurs in small data, and in orders that repeat some prompts more often. Groups
    end, and are replaced, while the policy trains.
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
    config = new_config(steps=25, data=data, dynamic_sampling={"enabled": True}, weight_sync={"mode": "keep"})
    world = Slow()
    train(world, config, prompts)
    requests = Counter((uid, seeds) for uid, seeds, _ in world.sampled)
    assert max(requests.values()) == 1 and len({uid for uid, _ in requests}) < len(requests)


@pytest.mark.parametrize(("prompts", "extra"), slow_after([(8, 1), (11, 3), (12, 2), (20, 12), (27, 5)], 2))
@pytest.mark.parametrize("order", ["epochs", "pass_rate"])
def test_data_that_barely_suffice_for_the_prompts_in_flight_always_have_one_more(prompts, extra, order):
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
    train(world, new_config(steps=15, data=data, batch=batch, dynamic_sampling=dynamic, max_staleness=1),
          fakes.prompts(prompts))  # fmt: skip
    assert len(world.ledger_entries) == 15
    requests = Counter((uid, seeds) for uid, seeds, _ in world.sampled)
    assert max(requests.values()) == 1


def test_replacements_do_not_revisit_prompts_in_flight(monkeypatch):
    """In epochs of a small data set, prompts recur while they are in flight, and are skipped until the next
    step.
    """
    visits, step_visits = Counter(), Counter()  # in total, and since the last step

    class Counted(PromptStream):
        def take(self, batch):
            (index,) = super().take(batch)
            visits[index] += 1
            step_visits[index] += 1
            assert step_visits[index] == 1
            return [index]

        def trained(self, indices, sampled):
            super().trained(indices, sampled)
            step_visits.clear()

    monkeypatch.setattr("grpo_dist.loop.pipeline.PromptStream", Counted)
    world = Timed(mixed_length, [f"p{i}" for i in range(24) if i % 4 != 1])
    train(world, new_config(steps=10, max_staleness=1, dynamic_sampling={"enabled": True}), fakes.prompts(24))
    assert max(visits.values()) > 1 and len(world.launched) > 60


def test_an_order_that_learns_is_asked_by_step_and_not_by_group(monkeypatch):
    """All groups of a launch, and their replacements, come from one draw; replacements between the end of a
    step and the next launch come from another, which knows that step.
    """
    draws = []
    take = Curriculum.take
    monkeypatch.setattr(Curriculum, "take", lambda self, draw: draws.append(draw) or take(self, draw))
    world = Timed(mixed_length, [f"p{i}" for i in range(0, 60, 4)])
    data = {"train": [{"path": "demo:add3"}], "order": "pass_rate"}
    config = new_config(steps=6, data=data, dynamic_sampling={"enabled": True, "max_extra_prompts": 3})
    train(world, config, fakes.prompts(60))
    assert draws == list(range(len(draws))) and len(draws) <= 2 * 6 < len(world.launched)
    assert all(len(set(uids)) == len(uids) for uids in step_uids(world))


# --- resuming


@pytest.mark.parametrize(
    ("dynamic", "order"), slow_after([(False, "epochs"), (True, "epochs"), (False, "pass_rate")], 1)
)
def test_a_resumed_run_launches_what_was_in_flight_again_and_loses_none(dynamic, order, tmp_path):
    prompts, silent = fakes.prompts(60), [f"p{i}" for i in range(0, 60, 4)] if dynamic else []
    config = new_config(
        steps=10, max_staleness=3, checkpoint={"every": 3, "background": False, "keep": 9},
        data={"train": [{"path": "demo:add3"}], "order": order},
        dynamic_sampling={"enabled": True, "max_extra_prompts": 3} if dynamic else {},
    )  # fmt: skip
    entries, start, progress, worlds = {}, 0, None, []
    for end in (3, 6, 9, 10):  # killed right after each checkpoint
        world = Timed(mixed_length, silent)
        world.version = start
        train(world, config, prompts, progress=progress)
        entries |= {s: world.ledger_entries[s] for s in range(start + 1, end + 1)}
        worlds.append(world)
        progress = through_files(world.saved[end], config, prompts, tmp_path / str(end))
        start = end
    assert progress.pipeline.order_indices == {} == progress.pipeline.partial
    uids = [[uid for outcome in entries[s].values() for uid in outcome] for s in range(1, 11)]
    assert all(len(set(step_uids)) == len(step_uids) for step_uids in uids)
    if order == "epochs":
        counts = Counter(uid for step_uids in uids for uid in step_uids)
        assert counts == PromptStream(prompts, 1, seed=0, state=progress.pipeline.order).sampled()
    first, second = worlds[0].saved[3].pipeline, worlds[1]
    done = {group.prompt.uid for groups in first.partial.values() for group in groups}
    assert not done & {uid for uid, _ in second.launched[: len(first.order_indices)]}
    staleness_max = [worlds[1].logged[s]["rollout/staleness_max"] for s in (4, 5, 6)]
    assert max(staleness_max) <= 3


def through_files(progress, config, prompts, directory):
    """Return ``progress`` after a round trip through the files of a checkpoint."""

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
    sampled = lambda *lengths: group_of([0] * len(lengths), lengths)  # noqa: E731
    bias.trained([(0, sampled(2, 4))])
    assert bias.settle({0}) is None  # another group of launch 0 is in flight
    bias.trained([(0, sampled(9)), (1, sampled(1, 3))])
    assert bias.settle({1}) == pytest.approx(19 / 5 / 5 - 1)  # as in the module's diagram
    resumed = LengthBias(bias.state)
    resumed.trained([(1, sampled(26))])
    assert resumed.settle(set()) == pytest.approx(0.0)


def test_carrying_over_leaves_no_length_bias_and_dropping_does(monkeypatch):
    """Lengths are 4 to 8, and 40 for a quarter of the prompts. Both runs train the first four of six groups
    to complete; one leaves the others in flight, the other cancels them.
    """

    class Dropping(FirstCome):
        async def next(self, **kwargs):
            batch = await super().next(**kwargs)
            for task in self._running:
                task.cancel()
            self._launches = Launches(self._per_step, self._max_staleness)
            self._order_indices = {}
            return batch

    def run_bias(kind):
        world = Timed(mixed_length)
        monkeypatch.setitem(PIPELINES, "completion", kind)
        config = new_config(
            steps=30, max_staleness=1, batch={"order": {"name": "completion", "oversample": 1.5}}
        )
        train(world, config, fakes.prompts(400))
        lengths = dict(world.launched)
        trained_lengths = [lengths[uid] for step in step_uids(world) for uid in step]
        return mean(trained_lengths) / mean([length for _, length in world.launched]) - 1.0, world.logged

    carried, logged = run_bias(FirstCome)
    assert carried == 0.0  # every launched group is trained
    assert logged[30]["rollout/length_bias"] == pytest.approx(0.0, abs=1e-12)
    early = [logged[s]["rollout/length_bias"] for s in (3, 4, 5)]
    assert min(early) < -0.02  # the run reports it while long answers are in flight
    assert abs(logged[29]["rollout/length_bias"]) < 0.05
    dropped, _ = run_bias(Dropping)
    assert dropped < -0.4
