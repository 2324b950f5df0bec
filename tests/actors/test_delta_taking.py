"""When the policy copies its weights for deltas: once for a transfer, however often that is repeated."""

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
        own, group = DeltaSync(), Group()

        async def dies():
            group.open.set()  # the copy is made later than the engine is lost
            raise ActorDiedError

        with pytest.raises(ActorDiedError):
            await own.take_during(dies(), group, 7)
        first = own.token
        assert group.tokens == [first] and own._taken.base is None
        assert await own.take_during(stopped(), group, 7) == [True, True]
        assert group.tokens == [first] and own.token == first
        await own.take_during(stopped(), group, 8)
        assert len(group.tokens) == 2 and own._taken.base == first

    asyncio.run(session())


def test_a_policy_that_is_lost_as_it_copies_leaves_no_copy():
    async def session():
        own, group = DeltaSync(), Group(failing=True)
        group.open.set()
        with pytest.raises(RayError, match="the policy is lost"):
            await own.take_during(stopped(), group, 7)
        assert own.token is None
        group.failing = False
        await own.take_during(stopped(), group, 7)
        assert own.token == group.tokens[1]

    asyncio.run(session())


def test_a_deadline_ends_the_wait_for_a_copy():
    async def session():
        own, group = DeltaSync(), Group()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):  # ends the first wait, which is that for the copy
                await own.take_during(stopped(), group, 7)
        await asyncio.sleep(0)
        group.open.set()
        await asyncio.sleep(0)
        assert own.token is None

    asyncio.run(session())
