"""How the episodes of an engine share calls to an environment worker, which is a fake here."""

import asyncio
from types import SimpleNamespace

import pytest

from actors.workers import environment
from actors.workers.environment import Act, ActingEpisode, EnvironmentCalls
from grpo_dist.environments.base import Problem
from grpo_dist.environments.episode import Action, Observed
from grpo_dist.types import Task
from tests.support.patience import HANG_S


class FakeWorker:
    """Answers actions at once, in "slow" episodes only through `answer`; "lost" ones raise."""

    def __init__(self):
        self.calls = []
        for name in ("prepare", "act", "answer", "end"):
            setattr(self, name, SimpleNamespace(remote=getattr(self, f"_{name}")))

    async def _act(self, acts):
        self.calls.append([act.episode.name for act in acts])
        if any("lost" in act.episode.name for act in acts):
            raise ConnectionError("the worker is gone")
        await asyncio.sleep(0)
        return [None if "slow" in act.episode.name else Observed(act.episode.name) for act in acts]

    async def _answer(self, episode):
        self.calls.append(episode)
        return Observed(f"late {episode}")

    def _prepare(self, episodes):
        self.calls.append(("prepare", [episode.name for episode in episodes]))

    def _end(self, episodes):
        self.calls.append(("end", episodes))


def act(episode):
    return Act(ActingEpisode(episode, Task("toy"), Problem("p", "1")), Action("a"), 0)


def run(session):
    return asyncio.run(asyncio.wait_for(session, HANG_S))


def test_episodes_of_one_moment_begin_in_one_call_before_they_act():
    async def session():
        worker = FakeWorker()
        line = EnvironmentCalls(worker)
        for name in ("e:0", "e:1"):
            line.begin(ActingEpisode(name, Task("toy"), Problem("p", "1")))
        await line.act(act("e:0"))
        return worker.calls

    assert run(session()) == [("prepare", ["e:0", "e:1"]), ["e:0"]]


def test_an_error_of_a_call_reaches_all_its_actions_and_no_later_ones():
    async def session():
        line = EnvironmentCalls(FakeWorker())
        errors = await asyncio.gather(line.act(act("e:0")), line.act(act("e:1 lost")), return_exceptions=True)
        return errors, await line.act(act("e:2"))

    errors, later = run(session())
    assert [str(error) for error in errors] == ["the worker is gone"] * 2
    assert later == Observed("e:2")


def test_an_abandoned_episode_does_not_disturb_the_others_of_its_call():
    async def session():
        line = EnvironmentCalls(FakeWorker())
        first, second = (asyncio.create_task(line.act(act(name))) for name in ("e:0", "e:1"))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        return await second

    assert run(session()) == Observed("e:1")


def test_ends_of_episodes_are_batched(monkeypatch):
    monkeypatch.setattr(environment, "_END_S", 0.01)

    async def session():
        worker = FakeWorker()
        line = EnvironmentCalls(worker)
        for name in ("e:0", "e:1"):
            line.end(name)
        assert worker.calls == []
        while not worker.calls:
            await asyncio.sleep(0.005)
        line.end("e:2")
        while len(worker.calls) < 2:
            await asyncio.sleep(0.005)
        return worker.calls

    assert run(session()) == [("end", ["e:0", "e:1"]), ("end", ["e:2"])]
