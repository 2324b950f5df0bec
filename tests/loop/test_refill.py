"""Dynamic sampling by group: which prompts are launched and when, independent of timing."""

import asyncio
import random

import numpy as np
import pytest

from grpo_dist.loop.pipeline import Refill
from grpo_dist.types import Group, Prompt
from tests.support.patience import HANG_S


def prompts(signals):
    """Return a prompt per letter: x has a signal, . is zero-variance."""
    ids = np.array([1], np.int32)
    return [Prompt(f"{i}{letter}", ids, "", "made") for i, letter in enumerate(signals)]


async def group(prompt):
    return Group(prompt, (), np.zeros(0, np.float32), {}, ())


def refill(sample, signals, size, oversample=1.0):
    has_signal = lambda group: group.prompt.uid.endswith("x")  # noqa: E731
    return Refill(sample, has_signal, prompts(signals), wanted=size, oversample=oversample)


def sampled_batch(signals, size, oversample=1.0, seed=None):
    delay = random.Random(seed)

    async def sample(prompt):
        for _ in range(delay.randrange(20) if seed is not None else 0):
            await asyncio.sleep(0)
        return await group(prompt)

    batch = asyncio.run(refill(sample, signals, size, oversample).batch())
    return "".join(g.prompt.uid for g in batch.groups), "".join(g.prompt.uid for g in batch.discarded)


@pytest.mark.parametrize(
    ("signals", "oversample", "groups", "discarded"),
    [
        ("xx.xxxx", 1.0, "0x1x3x4x", "2."),  # 5 and 6 are never launched
        ("x..x.xxx", 1.0, "0x3x5x6x", "1.2.4."),
        ("....", 1.0, "0.1.2.3.", ""),
        ("x....", 1.0, "0x1.2.3.", "4."),  # no prompts left: zero-variance groups fill the batch
        ("x..xxxx", 2.0, "0x3x4x5x", "6x1.2."),  # two are missing after the first four: two replacements each
        ("x.xxxxx", 2.0, "0x2x3x4x", "5x1."),
    ],
)
def test_the_batch_by_hand_and_whatever_the_timing(signals, oversample, groups, discarded):
    for seed in (None, *range(20)):
        assert sampled_batch(signals, 4, oversample, seed) == (groups, discarded)


@pytest.mark.parametrize("oversample", [1.0, 1.3, 2.0])
def test_random_batches_do_not_depend_on_timing(oversample):
    for case in range(30):
        signals = "".join(random.Random(case).choices("x.", k=40))
        batches = {sampled_batch(signals, 6, oversample, seed) for seed in range(6)}
        assert len(batches) == 1, signals


def test_a_replacement_is_launched_while_a_slow_group_is_still_sampled():
    slow_ends, launched = asyncio.Event(), []

    async def sample(prompt):
        launched.append(prompt.uid)
        if prompt.uid == "0x":
            await slow_ends.wait()
        if prompt.uid == "3x":
            slow_ends.set()  # launched in waves, this would wait for the slow group forever
        return await group(prompt)

    async def run():
        async with asyncio.timeout(HANG_S):
            return await refill(sample, "x..xx", 2).batch()

    batch = asyncio.run(run())
    assert [g.prompt.uid for g in batch.groups] == ["0x", "3x"]
    assert launched == ["0x", "1.", "2.", "3x"]


def test_a_failure_cancels_the_others_and_is_raised_itself():
    cancelled = []

    async def sample(prompt):
        if prompt.uid == "1x":
            raise RuntimeError("engine died")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(prompt.uid)
            raise

    with pytest.raises(RuntimeError, match="engine died"):
        asyncio.run(refill(sample, "xx", 2).batch())
    assert cancelled == ["0x"]
