"""prime-rl#1902, "fix off policy off by one": the age of a sample was compared with the bound before it was
incremented, so with a bound of 0 some samples came from two versions of the policy.
"""

import asyncio
import dataclasses

import numpy as np
import pytest

from tests.support import fakes
from tests.support.fakes import train


def updates_survived(bound, *, counts_first):
    """Return the number of updates during which a sample may continue before it is cancelled."""
    age = 0
    for update in range(10):
        if counts_first:
            age += 1
        if age > bound:
            return update
        if not counts_first:
            age += 1
    raise AssertionError("never cancelled")


class Spanning(fakes.World):
    """The second token of a sample has the version of the weights at its end."""

    async def sample(self, prompt, **request):
        first = self.version
        for _ in range(20):
            await asyncio.sleep(0)
        rollouts = await super().sample(prompt, **request)
        versions = np.array([first, self.version], np.int32)
        return tuple(dataclasses.replace(rollout, policy_versions=versions) for rollout in rollouts)


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_the_bug_lets_a_sample_live_through_one_update_more(bound):
    assert updates_survived(bound, counts_first=True) == bound
    assert updates_survived(bound, counts_first=False) == bound + 1


@pytest.mark.parametrize("mode", ["drain", "keep"])
@pytest.mark.parametrize("bound", [0, 1, 2, 3])
def test_no_token_is_staler_than_the_bound_and_some_are_as_stale(bound, mode):
    config = fakes.config(steps=8, max_staleness=bound, weight_sync={"mode": mode})
    world = train(Spanning(jitter=False), config, fakes.prompts(60))
    assert [world.logged[step]["rollout/staleness_max"] for step in range(1, 9)] == [
        min(step - 1, bound) for step in range(1, 9)
    ]


def test_with_a_bound_of_0_a_sample_has_one_version():
    world = Spanning(jitter=False)
    versions = set()
    score = world.score

    async def noted(prompt, rollouts):
        versions.update(tuple(rollout.policy_versions.tolist()) for rollout in rollouts)
        return await score(prompt, rollouts)

    world.score = noted
    train(world, fakes.config(steps=4), fakes.prompts(40))
    assert versions == {(step, step) for step in range(4)}
