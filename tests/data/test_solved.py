"""Prompts that the policy solves are left out; prompts with long answers share steps."""

import asyncio
import json
from collections import Counter, deque
from dataclasses import asdict

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from grpo_dist.config import Config
from grpo_dist.config.checks import contradictions
from grpo_dist.data.order import OrderState, shuffled
from grpo_dist.data.stream import LengthOrder, PromptStream, SolvedPrompts, right_share
from grpo_dist.driver import run
from grpo_dist.types import Group, Rollout
from tests.support import fakes
from tests.support.made_groups import group

DEMO = [{"path": "demo:add3"}]
START = OrderState()


def outcome(index, right, *, samples=4, unscored=0):
    """Return a group of prompt ``index`` with ``right`` right samples."""
    rewards = [1.0] * right + [float("nan")] * unscored + [0.0] * (samples - right - unscored)
    return group(index, np.random.default_rng(0), samples=samples, rewards=rewards)


def track_solved(n, *, share=0.9, keep=1, passed=None):
    return SolvedPrompts(fakes.prompts(n), passed or {}, share=share, keep=keep)


def make_stream(n, per_batch, *, state=START, keep=None, share=0.9):
    solved_prompts = track_solved(n, share=share, keep=keep or per_batch, passed=state.left_out)
    return PromptStream(fakes.prompts(n), per_batch, seed=0, state=state, solved=solved_prompts)


def make_window_order(n, per_step, *, state=START, window=2):
    solved_prompts = track_solved(n, keep=per_step, passed=state.left_out)
    sizes = {"per_step": per_step, "window": window}
    return LengthOrder(fakes.prompts(n), per_step, **sizes, seed=0, state=state, solved=solved_prompts)


# --- which prompts


def test_the_share_by_hand():
    """9 of 10 are the required 0.9; a sample that could not be scored is not right."""
    assert [right_share(outcome(0, right, samples=10)) for right in (8, 9, 10)] == [0.8, 0.9, 1.0]
    assert right_share(outcome(0, 9, samples=10, unscored=1)) == 0.9
    assert right_share(outcome(0, 1, samples=10, unscored=9)) == 0.1
    tracker = track_solved(4)
    groups = [outcome(i, right, samples=10) for i, right in enumerate((8, 9))]
    tracker.observe([*groups, outcome(2, 1, samples=10, unscored=9)])
    assert tracker.is_out.tolist() == [False, True, False, False] and tracker.passed == {"p1": 0}


def test_samples_that_a_group_lacks_count_as_not_right():
    """Two of eight came, both right: the other six are unknown. Nine right ones of ten solve a prompt."""
    assert right_share(outcome(0, 2, samples=2), 8) == 0.25
    tracker = SolvedPrompts(fakes.prompts(3), {}, share=0.9, samples=10)
    tracker.observe([outcome(0, 5, samples=5), outcome(1, 9, samples=9)])
    assert tracker.passed == {"p1": 0}


def test_the_latest_group_decides_and_a_prompt_never_returns():
    tracker = track_solved(3, share=1.0)
    for right in (0, 0, 4):
        tracker.observe([outcome(0, right)])
    assert tracker.passed == {"p0": 0}
    tracker.observe([outcome(0, 0)])  # from a step in flight
    assert tracker.is_out.tolist() == [True, False, False]


def test_as_many_stay_as_the_steps_in_flight_hold_and_one_warning_names_them(caplog):
    tracker = track_solved(5, keep=3)
    tracker.observe([outcome(i, 4) for i in range(5)])
    tracker.observe([outcome(i, 4) for i in range(2, 5)])
    assert tracker.passed == {"p0": 0, "p1": 0}
    assert [record.getMessage() for record in caplog.records if record.name == "grpo_dist"] == [
        "data.order.drop_solved = 0.9: 2 of 5 prompts are solved and left out; the other 3 stay, solved or "
        "not, since the steps in flight hold 3. The run continues with them; end it, or start one with "
        "further prompts"
    ]  # fmt: skip


# --- the order


def test_later_epochs_have_the_others_in_the_order_of_their_permutation():
    """Six prompts, two per batch; the first batch is solved in epoch 0, and one more prompt in epoch 1."""
    order, epochs = make_stream(6, 2), [shuffled(6, 0, epoch).tolist() for epoch in range(3)]
    prompts = []
    for batch, right in enumerate((4, 0, 0)):
        indices = order.take(batch)
        prompts += map(order.prompt, indices)
        order.trained(indices, [outcome(order.prompt(index), right) for index in indices])
    assert prompts == epochs[0] and order.state.left_out == {f"p{i}": 0 for i in epochs[0][:2]}
    unsolved = [i for i in epochs[1] if i not in epochs[0][:2]]
    assert [order.prompt(index) for index in order.take(3)] == unsolved[:2]
    order.trained([], [outcome(unsolved[0], 4)])
    prompts = [order.prompt(index) for batch in (4, 5) for index in order.take(batch)]
    expected = unsolved[2:] + [i for i in epochs[2] if i in unsolved[1:]]
    assert prompts == expected[:4] and prompts[:2] == unsolved[2:]


def test_a_returned_prompt_that_was_solved_meanwhile_is_passed_over():
    order = make_stream(6, 3)
    indices = order.take(0)
    first, second, third = map(order.prompt, indices)
    order.trained(indices, [outcome(first, 0)])  # the other two wait
    order.trained([], [outcome(second, 4)])
    assert order.prompt(order.take(1)[0]) == third
    assert order.state.left_out == {f"p{second}": 1}


@pytest.mark.parametrize("make", [make_stream, make_window_order])
@pytest.mark.parametrize("ahead", [0, 2])
def test_turns_balance_with_what_was_sampled_and_a_state_continues_the_same(make, ahead):
    """Prompt i is solved in its group number 2 + i % 5, and prompts of 7, 14, ... never."""
    n, counts, resumed = 40, Counter(), None
    order, launched = make(n, 4), deque()
    for batch in range(120):
        if batch == 50:
            state = TypeAdapter(OrderState).validate_python(json.loads(json.dumps(asdict(order.state))))
            resumed = make(n, 4, state=state)
        while len(launched) <= ahead:
            launched.append(order.take(batch))
            assert resumed is None or resumed.take(batch) == launched[-1]
        indices = launched.popleft()
        prompts = [order.prompt(index) for index in indices]
        assert len(set(prompts)) == 4
        counts.update(f"p{i}" for i in prompts)
        groups = [outcome(i, 4 if i % 7 and counts[f"p{i}"] >= 2 + i % 5 else 3) for i in prompts]
        order.trained(indices, groups)
        if resumed is not None:
            resumed.trained(indices, groups)
    pending = [index for indices in launched for index in indices]
    assert order.sampled(pending) == counts
    assert PromptStream(fakes.prompts(n), 4, seed=0, state=order.state).sampled(pending) == counts
    assert set(order.state.left_out) == {f"p{i}" for i in range(n) if i % 7}
    assert all(abs(counts[f"p{i}"] - 2 - i % 5) <= ahead for i in range(n) if i % 7)
    assert min(counts[f"p{i}"] for i in range(0, n, 7)) > 20


def test_windows_are_of_what_is_left():
    """40 prompts, steps of 5, windows of 2 steps: with half left out an epoch has 2 windows, not 4."""
    order = make_window_order(40, 5)
    for batch in range(8):
        indices = order.take(batch)
        order.trained(indices, [outcome(order.prompt(i), 4 if order.prompt(i) % 2 else 0) for i in indices])
    plain = [i for i in shuffled(40, 0, 1).tolist() if i % 2 == 0]
    steps = [{order.prompt(index) for index in order.take(batch)} for batch in range(8, 12)]
    assert [steps[0] | steps[1], steps[2] | steps[3]] == [set(plain[:10]), set(plain[10:])]
    assert order.state.position == 80


# --- a run


class Learner(fakes.World):
    """All samples of an even prompt are right from its second group on."""

    def __init__(self, *, seen=None, **how):
        super().__init__(**how)
        self.seen = Counter(seen)

    async def score(self, prompt, rollouts):
        rewards = np.array([float(r.completion_ids[0] % 2) for r in rollouts], np.float32)
        rewards[0] = 0.0
        if int(prompt.uid[1:]) % 2 == 0 and self.seen[prompt.uid]:
            rewards[:] = 1.0
        self.seen[prompt.uid] += 1
        return Group(prompt, rollouts, rewards, {"fake": rewards}, ("",) * len(rollouts))


def train(world, config, progress=None, count=16):
    workers = world.workers(reference=config.needs_reference)
    asyncio.run(run(config, workers, fakes.prompts(count), [], world, world, progress))


@pytest.mark.parametrize("order", ["epochs", "length"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_draws_no_solved_prompt_counts_them_and_resumes_the_same(order, staleness):
    """16 prompts, 4 a step: after two epochs, 8 steps, the 8 even ones are solved; the others stay."""
    config = fakes.config(
        steps=16, max_staleness=staleness, checkpoint={"every": 4},
        data={"train": DEMO, "order": {"name": order, "drop_solved": 0.9}},
    )  # fmt: skip
    whole = Learner()
    train(whole, config)
    counts = Counter(uid for uid, _, _ in whole.sampled)
    once_more = {counts[f"p{i}"] for i in range(0, 16, 2)} - {2}  # from a step in flight
    assert sum(counts.values()) == 64 and once_more <= set(range(3, 3 + staleness))
    assert all(5 <= counts[f"p{i}"] <= 6 for i in range(1, 16, 2))
    left_out = [whole.logged[step]["data/left_out"] for step in range(1, 17)]
    assert left_out[:4] == [0] * 4 and left_out == sorted(left_out) and left_out[8:] == [8] * 8
    for start in (8, 12):
        progress = whole.saved[start]
        ahead = [g for batch in progress.pipeline.ahead.values() for g in batch.groups]
        trained = [uids for step in range(1, start + 1) for uids in whole.ledger_entries[step].values()]
        second = Learner(seen=Counter([u for uids in trained for u in uids] + [g.prompt.uid for g in ahead]))
        second.version = start
        train(second, config, progress)
        pairs = zip(whole.updates[start:], second.updates, strict=True)
        assert all(torch.equal(a[0].tokens, b[0].tokens) for a, b in pairs)
        assert [second.logged[s]["data/left_out"] for s in range(start + 1, 17)] == left_out[start:]


@pytest.mark.parametrize(
    "settings",
    [
        {
            "batch": {"prompts_per_step": 4, "samples_per_prompt": 2, "order": "completion"},
            "max_staleness": 2,
        },
        {"dynamic_sampling": {"enabled": True, "max_extra_prompts": 2}},
    ],
)
def test_groups_done_first_and_replaced_ones_leave_their_prompts_out_too(settings):
    config = fakes.config(
        steps=24, checkpoint={"every": 24}, data={"train": DEMO, "order": {"drop_solved": 0.9}}, **settings
    )
    world = Learner()
    train(world, config, count=40)
    pipeline = world.saved[24].pipeline
    assert set(pipeline.order.left_out) == {f"p{i}" for i in range(0, 40, 2)}
    counts = Counter(uid for uid, _, _ in world.sampled)
    assert max(counts[f"p{i}"] for i in range(0, 40, 2)) == 2
    trained = Counter(u for e in world.ledger_entries.values() for uids in e.values() for u in uids)
    order = PromptStream(fakes.prompts(40), 1, seed=0, state=pipeline.order)
    assert trained == order.sampled(i for batch in pipeline.order_indices.values() for i in batch)


def test_a_run_whose_prompts_are_all_solved_continues_with_as_many_as_its_steps_need(caplog):
    config = fakes.config(steps=12, max_staleness=1, data={"train": DEMO, "order": {"drop_solved": 0.1}})
    train(world := fakes.World(), config, count=20)
    assert len(world.updates) == 12
    assert world.logged[12]["data/left_out"] == 12  # 8 of 20 are in flight
    assert caplog.text.count("data.order.drop_solved = 0.1: 12 of 20") == 1


# --- settings


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"order": {"name": "pass_rate", "drop_solved": 0.9}}, "order.pass_rate.drop_solved"),
        ({"train": [{"path": "demo:add3", "weight": 2.0}]}, "could not supply their shares"),
        ({"order": {"drop_solved": 0.0}}, "drop_solved"),
        ({"order": {"drop_solved": 1.5}}, "drop_solved"),
    ],
)
def test_settings_without_epochs_and_impossible_shares_are_refused(data, message):
    base = {"train": DEMO, "order": {"drop_solved": 0.9}}
    with pytest.raises(ValidationError, match=message):
        Config.model_validate({"model": {"path": "m"}, "data": base | data})


def test_a_control_with_shuffled_rewards_is_refused():
    config = fakes.config(data={"train": DEMO, "order": {"drop_solved": 0.9}})
    rewards = config.rewards.model_copy(update={"shuffle": True})
    control = config.model_copy(update={"rewards": rewards})
    assert [m for m in contradictions(control) if "`data.order.drop_solved`" in m]
    assert not [m for m in contradictions(config) if "drop_solved" in m]


def make_order(n, per_step, *, window=4, per_batch=None, seed=0, state=None):
    sizes = {"per_step": per_step, "window": window, "seed": seed, "state": state or OrderState()}
    return LengthOrder(fakes.prompts(n), per_batch or per_step, **sizes)


def group_with(number, tokens):
    rollouts = tuple(
        Rollout(f"p{number}", i, np.full(n, 3, np.int32), np.zeros(n, np.float32), "stop", "x",
                np.zeros(n, np.int32))
        for i, n in enumerate(tokens)
    )  # fmt: skip
    rewards = np.arange(len(tokens), dtype=np.float32)
    prompt = fakes.prompts(number + 1)[number]
    return Group(prompt, rollouts, rewards, {"fake": rewards}, ("correct",) * len(tokens))


def length(prompt):
    """Every fifth prompt has answers of 900 tokens, the others of 10 to 19."""
    return 900 if prompt % 5 == 0 else 10 + prompt % 10


def epochs(order, n, steps):
    """Run ``steps``; return the prompts of each step."""
    prompts_of_steps = []
    for step in range(steps):
        indices = order.take(step)
        prompts = [order.prompt(index) for index in indices]
        order.trained(indices, [group_with(p, [length(p)]) for p in prompts])
        prompts_of_steps.append(prompts)
    return prompts_of_steps


@pytest.mark.parametrize(
    ("n", "per_step", "window"), [(40, 5, 4), (43, 5, 4), (41, 5, 8), (5, 3, 2), (7, 7, 1), (23, 4, 100)]
)
def test_every_prompt_comes_once_per_epoch_and_no_step_has_one_twice(n, per_step, window):
    order = make_order(n, per_step, window=window)
    steps = epochs(order, n, 6 * n)
    assert all(len(set(step)) == per_step for step in steps)
    counts = Counter(p for step in steps for p in step)
    assert set(counts.values()) <= {6 * per_step - 1, 6 * per_step, 6 * per_step + 1}
    expected = order.sampled()
    assert counts == Counter({int(uid[1:]): times for uid, times in expected.items()})


def test_no_prompt_leaves_its_window_of_the_epochs_permutation():
    order, n, per_step, window = make_order(80, 5, window=4), 80, 5, 4
    steps = epochs(order, n, 3 * n // per_step)
    for begin in range(0, len(steps), window):
        epoch, at = divmod(begin * per_step, n)
        plain = shuffled(n, 0, epoch)[at : at + window * per_step].tolist()
        assert sorted(p for step in steps[begin : begin + window] for p in step) == sorted(plain)


def test_prompts_with_long_answers_share_steps_once_their_lengths_are_known():
    order = make_order(80, 5, window=16)  # a window is an epoch, and a fifth of it is long
    steps = epochs(order, 80, 16 * 6)
    waits = [sum(max(map(length, step)) == 900 for step in steps[i : i + 16]) for i in range(0, 96, 16)]
    assert waits[0] > 8 and waits[2:] == [4, 4, 4, 4]  # 16 long prompts in steps of 5
    places = {tuple(i for i in range(16) if max(map(length, steps[16 * e + i])) == 900) for e in range(2, 6)}
    assert len(places) == 4  # which steps these are differs from epoch to epoch


def test_without_known_lengths_the_steps_follow_the_epochs_permutation():
    order = make_order(40, 5, window=4)
    steps = [sorted(order.prompt(i) for i in order.take(step)) for step in range(4)]
    plain = shuffled(40, 0, 0)
    assert sorted(steps) == sorted(sorted(plain[i : i + 5].tolist()) for i in range(0, 20, 5))


def test_the_expected_length_is_an_exponential_mean_or_the_mean_of_known_prompts():
    order = make_order(4, 2)
    order.trained([], [group_with(0, [10, 30])])
    assert order.state.lengths == {"p0": 20.0}
    order.trained([], [group_with(0, [60]), group_with(1, [100])])
    assert order.state.lengths == {"p0": 40.0, "p1": 100.0}
    at = {order.prompt(index): index for index in range(4)}
    assert order._expected(np.array([at[0], at[1], at[2]])).tolist() == [40.0, 100.0, 70.0]


def test_a_state_continues_the_same_order_and_returned_prompts_come_next():
    whole = make_order(43, 5, per_batch=9)
    resumed = None
    for step in range(60):
        if step == 17:
            resumed = make_order(43, 5, per_batch=9, state=whole.state)
        indices = whole.take(step)
        groups = [group_with(p, [length(p)]) for p in map(whole.prompt, indices[:6])]
        whole.trained(indices, groups)
        assert whole.state.waiting[:3] == tuple(indices[6:])
        if resumed is not None:
            assert resumed.take(step) == indices
            resumed.trained(indices, groups)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_by_length_depends_neither_on_timing_nor_on_a_restart(staleness):
    config = fakes.config(
        steps=20, max_staleness=staleness, checkpoint={"every": 10},
        data={"train": DEMO, "order": {"name": "length", "window": 3}},
    )  # fmt: skip
    worlds = []
    for jitter, start in ((True, 0), (False, 0), (True, 10)):
        world = fakes.World(jitter=jitter)
        world.version = start
        progress = worlds[0].saved[10] if start else None
        workers = world.workers(config.needs_reference)
        asyncio.run(run(config, workers, fakes.prompts(40), [], world, world, progress))
        worlds.append(world)
    whole, other, resumed = (world.updates for world in worlds)
    pairs = [*zip(whole, other, strict=True), *zip(whole[10:], resumed, strict=True)]
    assert all(torch.equal(a[0].tokens, b[0].tokens) for a, b in pairs)
    counts = Counter(uid for uid, _, _ in worlds[0].sampled)
    trained = 20 * config.batch.prompts_per_step
    assert sum(counts.values()) == trained and max(counts.values()) - min(counts.values()) <= 1
    assert set(worlds[0].saved[20].pipeline.order.lengths) == set(counts)
