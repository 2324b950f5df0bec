"""When the policy copies its weights for deltas: once per transfer, however often it is repeated."""

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, RayError

from actors.weight_sync import DeltaSync
from actors.workers.policy import Taken


class Group:
    """A policy that copies its weights once ``open`` is set; ``failing``: it is lost meanwhile."""

    def __init__(self, failing=False):
        self.policy, self.failing = SimpleNamespace(updates=3), failing
        self.tokens, self.open = [], asyncio.Event()

    async def take(self, token):
        self.tokens.append(token)
        await self.open.wait()
        if self.failing:
            raise RayError("the policy is lost")
        return Taken(self.tokens[-2] if len(self.tokens) > 1 else None, {})


async def stopped():
    return [True, True]


def test_a_transfer_that_an_engine_ended_as_it_stopped_is_repeated_with_the_same_copy():
    async def session():
        deltas, group = DeltaSync(), Group()

        async def dies():
            group.open.set()  # the copy ends after the engine is lost
            raise ActorDiedError

        with pytest.raises(ActorDiedError):
            await deltas.take_during(dies(), group, 7)
        first = deltas.token
        assert group.tokens == [first] and deltas._taken.base is None
        assert await deltas.take_during(stopped(), group, 7) == [True, True]
        assert group.tokens == [first] and deltas.token == first
        await deltas.take_during(stopped(), group, 8)
        assert len(group.tokens) == 2 and deltas._taken.base == first

    asyncio.run(session())


def test_a_policy_that_is_lost_as_it_copies_leaves_no_copy():
    async def session():
        deltas, group = DeltaSync(), Group(failing=True)
        group.open.set()
        with pytest.raises(RayError, match="the policy is lost"):
            await deltas.take_during(stopped(), group, 7)
        assert deltas.token is None
        group.failing = False
        await deltas.take_during(stopped(), group, 7)
        assert deltas.token == group.tokens[1]

    asyncio.run(session())


def test_a_deadline_ends_the_wait_for_a_copy():
    async def session():
        deltas, group = DeltaSync(), Group()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):  # ends the first wait, the one for the copy
                await deltas.take_during(stopped(), group, 7)
        await asyncio.sleep(0)
        group.open.set()
        await asyncio.sleep(0)
        assert deltas.token is None

    asyncio.run(session())
