"""What the driver says of environment workers, to the user and to the engines; workers are fakes here."""

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError

from actors.lifecycle import team
from actors.lifecycle.calls import Health
from actors.lifecycle.team import ActorSpec
from actors.workers import environment
from actors.workers.environment import EnvironmentPool
from grpo_dist.config import EnvironmentsConfig, RestartsConfig
from tests.support.patience import HANG_S


class FakeWorker:
    """Answers until it is dead."""

    def __init__(self, notes):
        self.dead, self._notes = False, notes
        for name in ("start", "health", "notes"):
            setattr(self, name, SimpleNamespace(remote=getattr(self, f"_{name}_")))

    async def _start_(self):
        pass

    async def _health_(self):
        if self.dead:
            raise ActorDiedError
        return Health()

    async def _notes_(self):
        await asyncio.sleep(0)
        return self._notes


class FakeSpec(ActorSpec):
    """Makes fakes, the n-th with the n-th of ``notes``."""

    notes = (["strong"], ["strong"], ["strong", "weak"], ["weak"])

    def makers(self, actor, count, *arguments, **keywords):
        notes = iter(self.notes)
        return [lambda name: FakeWorker(next(notes))] * count


@pytest.fixture
def said(monkeypatch):
    found = []
    monkeypatch.setattr(environment, "say", found.append)
    monkeypatch.setattr(team, "kill", lambda workers: None)
    monkeypatch.setattr(team, "HEALTH_S", 0.01)
    return found


def with_pool(play, restarts):
    async def session():
        pool = EnvironmentPool(EnvironmentsConfig(num_workers=2), FakeSpec(restarts=restarts))
        told = []
        engine = SimpleNamespace(use_environments=SimpleNamespace(remote=told.append))
        pool.engines = [SimpleNamespace(named=lambda: {"rollout-0": engine})]
        await pool.ready()
        try:
            return await asyncio.wait_for(play(pool, told), HANG_S)
        finally:
            pool._failing.cancel()
            await pool.team.shutdown()

    return asyncio.run(session())


def test_what_a_replacement_notes_is_reported_once_and_engines_get_it(said):
    async def play(pool, told):
        for count in (1, 2):
            pool.workers[0].dead = True
            while len(told) < count or not pool.team.is_whole:
                await asyncio.sleep(0.005)
            assert set(told[-1].workers) == set(pool.workers)
        return told

    told = with_pool(play, RestartsConfig(backoff_s=0.01))
    assert said == ["environments: strong", "environments: weak"]
    assert [addresses.failure for addresses in told] == ["", ""]


def test_all_addresses_behind_a_failure_of_the_role_carry_it(said):
    """Those of an engine that is replaced, too: its episodes would wait for a worker that never comes."""

    async def play(pool, told):
        pool.workers[0].dead = True
        while not told:
            await asyncio.sleep(0.005)
        return *told, pool.addresses()

    told = with_pool(play, RestartsConfig(max_per_worker=0))
    assert len(told) == 2
    assert all(addresses.failure.startswith("environment-0 is lost") for addresses in told)
