"""What the driver reports about environment workers to the user and to the engines; workers are fakes."""

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
def reports(monkeypatch):
    messages = []
    monkeypatch.setattr(environment, "say", messages.append)
    monkeypatch.setattr(team, "kill", lambda workers: None)
    monkeypatch.setattr(team, "HEALTH_S", 0.01)
    return messages


def with_pool(play, restarts):
    async def session():
        pool = EnvironmentPool(EnvironmentsConfig(num_workers=2), FakeSpec(restarts=restarts))
        sent = []
        engine = SimpleNamespace(use_environments=SimpleNamespace(remote=sent.append))
        pool.engines = [SimpleNamespace(named=lambda: {"rollout-0": engine})]
        await pool.ready()
        try:
            return await asyncio.wait_for(play(pool, sent), HANG_S)
        finally:
            pool._failing.cancel()
            await pool.team.shutdown()

    return asyncio.run(session())


def test_what_a_replacement_notes_is_reported_once_and_engines_get_it(reports):
    async def play(pool, sent):
        for count in (1, 2):
            pool.workers[0].dead = True
            while len(sent) < count or not pool.team.is_whole:
                await asyncio.sleep(0.005)
            assert set(sent[-1].workers) == set(pool.workers)
        return sent

    sent = with_pool(play, RestartsConfig(backoff_s=0.01))
    assert reports == ["environments: strong", "environments: weak"]
    assert [addresses.failure for addresses in sent] == ["", ""]


def test_all_addresses_sent_after_a_failure_of_the_role_carry_it(reports):
    """Also for a replaced engine: its episodes would wait for a worker that never comes."""

    async def play(pool, sent):
        pool.workers[0].dead = True
        while not sent:
            await asyncio.sleep(0.005)
        return *sent, pool.addresses()

    sent = with_pool(play, RestartsConfig(max_per_worker=0))
    assert len(sent) == 2
    assert all(addresses.failure.startswith("environment-0 is lost") for addresses in sent)
