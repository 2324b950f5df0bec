"""The environment worker without Ray: batches of actions, episodes that end, and what fails alone."""

import asyncio
import json
import os
import signal
from types import SimpleNamespace

import psutil
import pytest

from actors.workers import environment
from actors.workers.environment import Act, ActingEpisode, EnvironmentCalls, EnvironmentWorker
from grpo_dist.config import EnvironmentsConfig, SandboxConfig
from grpo_dist.environments import runner
from grpo_dist.environments.base import Problem
from grpo_dist.environments.episode import Action, Call, Observed
from grpo_dist.environments.runner import UnknownEpisode
from grpo_dist.environments.sandbox.python import PythonSandbox
from grpo_dist.types import Task
from tests.environments.sandbox.found import FOUND
from tests.support.patience import HANG_S
from tests.support.toy_environments import ToyWorker


def act(episode, turn=0, **kwargs):
    task = Task("toy", {"turns": 3} | kwargs)
    return Act(ActingEpisode(episode, task, Problem("p", "1")), Action("abc"), turn)


def python(episode, *codes, turn=0):
    calls = tuple(Call("python", json.dumps({"code": code})) for code in codes)
    return Act(ActingEpisode(episode, Task("python"), Problem("p", "1")), Action("", calls), turn)


def with_worker(play, worker=None):
    async def session():
        played = worker or ToyWorker(None)
        await played.start()
        try:
            return await asyncio.wait_for(play(played), HANG_S)
        finally:
            await played.close()

    return asyncio.run(session())


def line_to(worker):
    """Return a line that calls ``worker`` without Ray."""
    names = ("act", "answer", "end")
    return EnvironmentCalls(SimpleNamespace(**{n: SimpleNamespace(remote=getattr(worker, n)) for n in names}))


def test_quick_answers_come_at_once_and_slow_ones_when_they_are_ready():
    async def play(worker):
        at_once = await worker.act([act("e:0"), act("e:1", seconds=0.5), act("e:2")])
        return at_once, await worker.answer("e:1")

    at_once, late = with_worker(play)
    assert at_once == [Observed("p0:3"), None, Observed("p0:3")]
    assert late == Observed("p0:3")


def test_a_lone_action_is_answered_by_its_own_call_however_long_that_takes(monkeypatch):
    monkeypatch.setattr(environment, "_AT_ONCE_S", 0.0)

    async def play(worker):
        line, episodes = line_to(worker), []

        async def answer(episode):
            episodes.append(episode)
            return await worker.answer(episode)

        line._worker.answer.remote = answer
        lone = await line.act(act("e:0", seconds=0.05))
        several = await asyncio.gather(*(line.act(act(f"e:{i}", seconds=0.05)) for i in (1, 2)))
        return [lone, *several], episodes

    answers, episodes = with_worker(play)
    assert answers == [Observed("p0:3")] * 3 and episodes == ["e:1", "e:2"]


def test_episodes_that_end_cancel_their_pending_actions():
    async def play(worker):
        await worker.hold(True)
        assert await worker.act([act("e:0"), act("e:1"), act("f:0")]) == [None] * 3
        await worker.end(["e:0", "e:9"])
        left = await worker.running()
        await worker.end_all("e")
        late = await worker.act([act("e:2")])  # sent before its engine was lost
        return left, await worker.running(), late

    left, after, late = with_worker(play)
    assert (left, after) == ({"e:1": 1, "f:0": 1}, {"f:0": 1})
    assert late == [Observed(failed="the engine is lost")]


def test_an_error_of_one_action_is_raised_only_to_its_episode():
    async def play(worker):
        line, task = line_to(worker), Task("calculator")
        episodes = [ActingEpisode(f"e:{i}", task, Problem("p", "1")) for i in range(3)]
        acts = [Act(episode, Action("1"), turn=i % 2) for i, episode in enumerate(episodes)]
        results = await asyncio.gather(*map(line.act, acts), return_exceptions=True)
        return results, worker._acting

    (first, unknown, third), left = with_worker(
        play, EnvironmentWorker(EnvironmentsConfig(), sandboxed=False)
    )
    assert isinstance(first, Observed) and first == third
    assert isinstance(unknown, UnknownEpisode) and left == {}


class HeldSandbox:
    """Runs code once ``open`` is set."""

    async def start(self):
        self.ran, self.open = [], asyncio.Event()
        return []

    async def run(self, episode, code):
        self.ran.append(code)
        await self.open.wait()
        return SimpleNamespace(output="", outcome="ok", seconds=0.0)

    async def end(self, episode): ...

    async def close(self): ...


def test_an_end_while_answers_are_waited_for_ends_the_action_and_later_ones_are_refused(monkeypatch):
    """Its further calls would start an interpreter that nobody ends."""
    sandbox = HeldSandbox()
    monkeypatch.setattr(runner, "PythonSandbox", lambda settings: sandbox)
    monkeypatch.setattr(environment, "_AT_ONCE_S", 1.0)  # the end comes before

    async def play(worker):
        acting = asyncio.create_task(worker.act([python("e:0", "1", "2")]))
        while not sandbox.ran:
            await asyncio.sleep(0)
        await worker.end(["e:0"])
        sandbox.open.set()
        assert await acting == [None]
        return await worker.act([python("e:0", "3", turn=1), python("e:1", "4")]), worker._acting

    (refused, other), left = with_worker(play, EnvironmentWorker(EnvironmentsConfig()))
    assert refused == Observed(failed="the episode has ended") and other.calls[0].outcome == "ok"
    assert sandbox.ran == ["1", "4"] and left == {}


def test_the_names_of_ended_episodes_are_kept_for_a_while_only(monkeypatch):
    monkeypatch.setattr(environment, "_ENDED", 2)

    async def play(worker):
        for i in range(4):
            await worker.end([f"e:{i}"])
        return list(worker._ended)

    assert with_worker(play) == ["e:2", "e:3"]


def test_episodes_end_side_by_side_and_one_that_cannot_end_keeps_no_other_from_it():
    """An environment has seconds to close: one after another, a batch of them would take minutes."""
    began, ended = [], []

    async def end(episode):
        began.append(episode)
        for _ in range(3):
            await asyncio.sleep(0)
        if episode == "e:0":
            raise RuntimeError("it stays")
        ended.append((episode, len(began)))

    async def play(worker):
        worker._runner.end = end
        with pytest.raises(RuntimeError, match="it stays"):
            await worker.end(["e:0", "e:1", "e:2"])
        for _ in range(10):
            await asyncio.sleep(0)

    with_worker(play)
    assert ended == [("e:1", 3), ("e:2", 3)]


def _interpreters(worker):
    """Return the processes of the sandbox that have none below them."""
    zygote = psutil.Process(worker._runner._sandbox._backend._host._child.pid)
    return {process.pid for process in zygote.children(recursive=True) if not process.children()}


@pytest.mark.slow
def test_a_killed_interpreter_costs_the_observation_of_its_call_alone(monkeypatch):
    sandbox = SandboxConfig(call_s=HANG_S, episode_s=4 * HANG_S, cpu_s=HANG_S, memory_mb=256)
    monkeypatch.setattr(runner, "PythonSandbox", lambda settings: PythonSandbox(settings, isolation=FOUND))

    async def play(worker):
        line = line_to(worker)

        async def calls(episode, turn, code):
            answer = await line.act(python(episode, code, turn=turn))
            assert not answer.failed
            return answer.calls[0].outcome, answer.calls[0].result

        await calls("e:0", 0, "x = 1")
        others = _interpreters(worker)
        await calls("e:1", 0, "x = 2")
        (victim,) = _interpreters(worker) - others
        killed = asyncio.create_task(calls("e:1", 1, "import time; time.sleep(10_000)"))
        first = await calls("e:0", 1, "x + 10")
        os.kill(victim, signal.SIGKILL)
        lost = await killed
        return first, lost, [await calls("e:1", 2, "'x' in globals()"), await calls("e:0", 2, "x + 20")]

    first, (outcome, text), later = with_worker(play, EnvironmentWorker(EnvironmentsConfig(sandbox=sandbox)))
    assert first == ("ok", "11\n")
    assert outcome == "died" and "variables and files of earlier calls are gone" in text
    assert later == [("ok", "False\n"), ("ok", "21\n")]
