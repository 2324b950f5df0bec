"""Tail batching: each prompt once per epoch, in its window, long ones together, the same after a resume."""

import asyncio
from collections import Counter

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from grpo_dist.config import Config
from grpo_dist.data.order import OrderState, shuffled
from grpo_dist.data.stream import LengthOrder
from grpo_dist.driver import run
from grpo_dist.types import Group, Rollout
from tests.support import fakes

DEMO = [{"path": "demo:add3"}]


def order(n, per_step, *, window=4, per_batch=None, seed=0, state=None):
    own = {"per_step": per_step, "window": window, "seed": seed, "state": state or OrderState()}
    return LengthOrder(fakes.prompts(n), per_batch or per_step, **own)


def group_with(number, tokens):
    rollouts = tuple(
        Rollout(
            f"p{number}",
            i,
            np.full(n, 3, np.int32),
            np.zeros(n, np.float32),
            "stop",
            "x",
            np.zeros(n, np.int32),
        )
        for i, n in enumerate(tokens)
    )
    rewards = np.arange(len(tokens), dtype=np.float32)
    return Group(
        fakes.prompts(number + 1)[number], rollouts, rewards, {"fake": rewards}, ("correct",) * len(tokens)
    )


def length(prompt):
    """Every fifth prompt has answers of 900 tokens, the others of 10 to 19."""
    return 900 if prompt % 5 == 0 else 10 + prompt % 10


def epochs(own, n, steps):
    """Run ``steps``; return the prompts of each."""
    found = []
    for step in range(steps):
        indices = own.take(step)
        prompts = [own.prompt(index) for index in indices]
        own.trained(indices, [group_with(p, [length(p)]) for p in prompts])
        found.append(prompts)
    return found


@pytest.mark.parametrize(
    ("n", "per_step", "window"), [(40, 5, 4), (43, 5, 4), (41, 5, 8), (5, 3, 2), (7, 7, 1), (23, 4, 100)]
)
def test_every_prompt_comes_once_per_epoch_and_no_step_has_one_twice(n, per_step, window):
    own = order(n, per_step, window=window)
    steps = epochs(own, n, 6 * n)
    assert all(len(set(step)) == per_step for step in steps)
    counts = Counter(p for step in steps for p in step)
    assert set(counts.values()) <= {6 * per_step - 1, 6 * per_step, 6 * per_step + 1}
    expected = own.sampled()
    assert counts == Counter({int(uid[1:]): times for uid, times in expected.items()})


def test_no_prompt_leaves_its_window_of_the_epochs_permutation():
    own, n, per_step, window = order(80, 5, window=4), 80, 5, 4
    steps = epochs(own, n, 3 * n // per_step)
    for begin in range(0, len(steps), window):
        epoch, at = divmod(begin * per_step, n)
        plain = shuffled(n, 0, epoch)[at : at + window * per_step].tolist()
        assert sorted(p for step in steps[begin : begin + window] for p in step) == sorted(plain)


def test_prompts_with_long_answers_share_steps_once_their_lengths_are_known():
    own = order(80, 5, window=16)  # a window is an epoch, and a fifth of it is long
    steps = epochs(own, 80, 16 * 6)
    waits = [sum(max(map(length, step)) == 900 for step in steps[i : i + 16]) for i in range(0, 96, 16)]
    assert waits[0] > 8 and waits[2:] == [4, 4, 4, 4]  # 16 long prompts in steps of 5
    places = {tuple(i for i in range(16) if max(map(length, steps[16 * e + i])) == 900) for e in range(2, 6)}
    assert len(places) == 4  # which steps these are differs from epoch to epoch


def test_without_known_lengths_the_steps_are_those_of_the_epochs_permutation():
    own = order(40, 5, window=4)
    steps = [sorted(own.prompt(i) for i in own.take(step)) for step in range(4)]
    plain = shuffled(40, 0, 0)
    assert sorted(steps) == sorted(sorted(plain[i : i + 5].tolist()) for i in range(0, 20, 5))


def test_the_expected_length_is_an_exponential_mean_and_that_of_known_prompts_where_none_is_known():
    own = order(4, 2)
    own.trained([], [group_with(0, [10, 30])])
    assert own.state.lengths == {"p0": 20.0}
    own.trained([], [group_with(0, [60]), group_with(1, [100])])
    assert own.state.lengths == {"p0": 40.0, "p1": 100.0}
    at = {own.prompt(index): index for index in range(4)}
    assert own._expected(np.array([at[0], at[1], at[2]])).tolist() == [40.0, 100.0, 70.0]


def test_a_state_continues_the_same_order_and_returned_prompts_come_next():
    whole = order(43, 5, per_batch=9)
    resumed = None
    for step in range(60):
        if step == 17:
            resumed = order(43, 5, per_batch=9, state=whole.state)
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
        data={"train": DEMO, "order": "length", "length_window": 3},
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


def test_a_window_without_the_order_is_refused():
    base = {"model": {"path": "m"}}
    with pytest.raises(ValidationError, match="length_window = 4 is of order length, but order = epochs"):
        Config.model_validate(base | {"data": {"train": DEMO, "length_window": 4}})
