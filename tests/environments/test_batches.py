"""Guarantees: an environment with `step_batch` answers the actions of many episodes in one call, in one
separate process; each episode keeps its state, and an error fails only the episode that raised it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from grpo_dist.config import EnvironmentsConfig
from grpo_dist.environments.base import Problem
from grpo_dist.environments.episode import Action, Call, Observed
from grpo_dist.environments.runner import EpisodeRunner
from grpo_dist.types import Task
from tests.environments.test_runner import session
from tests.support.patience import HANG_S

_CODE = '''
import asyncio, os, time
from pathlib import Path
from grpo_dist.environments.base import Environment, Step


def where() -> int:
    """Return the process."""
    return os.getpid()


class Together(Environment):
    """Answers with all that it was said; a call takes until the file `gate` is there."""

    tools = [where]

    def __init__(self, directory: str) -> None:
        self.directory, self.said = Path(directory), []

    def start(self, problem):
        if problem.answer == "cannot":
            raise KeyError("no such problem")
        self.name = problem.answer
        return problem.text

    @classmethod
    async def step_batch(cls, episodes, actions):
        directory = episodes[0].directory
        while not (directory / "gate").exists():
            await asyncio.sleep(0.01)
        if "all" in actions:
            raise RuntimeError("all of them")
        if "exit" in actions:
            os._exit(3)
        if "few" in actions:
            return []
        with (directory / "calls").open("a") as calls:
            print(len(actions), os.getpid(), file=calls)
        for episode, action in zip(episodes, actions):
            episode.said.append(action)
        # An answer that is none is the failure of its own episode.
        return [None if a == "none" else e.answer(a) for e, a in zip(episodes, actions)]

    def answer(self, action):
        if action == "long":
            return Step("x" * 2**23)
        said = f"{self.name}: {' '.join(self.said)}"
        return Step(said, reward=float(len(self.said)), done=action == "end")

    def close(self):
        with (self.directory / "closed").open("a") as closed:
            print(self.name, file=closed)

    @classmethod
    def problems(cls, split, count, directory):
        yield {"problem": "Say something.", "answer": "one"}


class Loaded(Environment):
    """Has read a file before any episode."""

    @classmethod
    def preload(cls, file):
        cls.text = Path(file).read_text()
        with Path(file).open("a") as counted:
            counted.write("x")

    def __init__(self, file):
        pass

    def step(self, action):
        return Step(self.text, done=False)
'''


@pytest.fixture
def settings(tmp_path: Path) -> EnvironmentsConfig:
    (tmp_path / "together.py").write_text(_CODE)
    return EnvironmentsConfig(code_paths=(str(tmp_path),), timeout_s=HANG_S)


@pytest.fixture
def runner(settings: EnvironmentsConfig) -> EpisodeRunner:
    return EpisodeRunner(settings)


async def act(
    runner: EpisodeRunner,
    directory: Path,
    episode: str,
    action: str | Action,
    turn: int = 0,
    answer: str = "",
) -> Observed:
    action = action if isinstance(action, Action) else Action(action)
    task = Task("together:Together", {"directory": str(directory)}, batched=True)
    return await runner.act(episode, task, Problem("?", answer or episode), action, turn=turn)


def calls(directory: Path) -> list[tuple[int, int]]:
    lines = (directory / "calls").read_text().splitlines()
    return [(int(count), int(pid)) for count, pid in map(str.split, lines)]


@pytest.mark.slow
@session
async def test_actions_that_come_during_a_call_share_the_next_one(
    tmp_path: Path, runner: EpisodeRunner
) -> None:
    first = asyncio.ensure_future(act(runner, tmp_path, "e0", "a"))
    while not runner._hosts or not next(iter(runner._hosts.values()))._host.is_live("all"):
        await asyncio.sleep(0.01)
    others = [asyncio.ensure_future(act(runner, tmp_path, f"e{i}", f"a{i}")) for i in range(1, 20)]
    await asyncio.sleep(0.1)
    (tmp_path / "gate").touch()
    assert (await first).observation == "e0: a"
    answers = await asyncio.gather(*others)
    assert [o.observation for o in answers] == [f"e{i}: a{i}" for i in range(1, 20)]
    again = await asyncio.gather(*(act(runner, tmp_path, f"e{i}", "end", 1) for i in range(20)))
    assert [(o.done, o.reward, o.failed) for o in again] == [(True, 2.0, "")] * 20
    assert [count for count, _ in calls(tmp_path)] == [1, 19, 20]
    assert len({pid for _, pid in calls(tmp_path)} | {os.getpid()}) == 2, "one process, and not this one"
    await asyncio.gather(*(runner.end(f"e{i}") for i in range(20)))
    assert sorted((tmp_path / "closed").read_text().split()) == sorted(f"e{i}" for i in range(20))


@session
async def test_long_answers_of_many_episodes_are_one_reply(tmp_path: Path, runner: EpisodeRunner) -> None:
    (tmp_path / "gate").touch()
    answers = await asyncio.gather(*(act(runner, tmp_path, episode, "long") for episode in "abc"))
    assert [(len(o.observation), o.failed) for o in answers] == [(2**23, "")] * 3


@pytest.mark.slow
@session
async def test_an_error_of_one_episode_fails_no_other(tmp_path: Path, runner: EpisodeRunner) -> None:
    (tmp_path / "gate").touch()
    call = Action("", (Call("where", "{}"),))
    fine, none, unstarted, called = await asyncio.gather(
        act(runner, tmp_path, "a", "x"),
        act(runner, tmp_path, "b", "none"),
        act(runner, tmp_path, "c", "x", answer="cannot"),
        act(runner, tmp_path, "d", call),
    )
    assert (fine.observation, fine.failed) == ("a: x", "")
    assert "step returned a NoneType, expected a Step" in none.failed
    assert "no such problem" in unstarted.failed
    assert int(called.calls[0].result) == calls(tmp_path)[0][1], "tools run in the same process"
    assert (await act(runner, tmp_path, "a", "y", 1)).observation == "a: x y"
    for word, reason in (("all", "all of them"), ("few", "step_batch returned 0 answers to 2 actions")):
        both = await asyncio.gather(
            act(runner, tmp_path, f"a{word}", word), act(runner, tmp_path, f"b{word}", "x")
        )
        assert all(reason in observed.failed for observed in both)
    assert (await act(runner, tmp_path, "a", "z", 2)).observation == "a: x y z"


@pytest.mark.parametrize("how", ["exit", "kill"])
@session
async def test_a_process_that_dies_fails_its_episodes_and_later_ones_get_another(
    tmp_path: Path, runner: EpisodeRunner, how: str
) -> None:
    (tmp_path / "gate").touch()
    await asyncio.gather(act(runner, tmp_path, "a", "x"), act(runner, tmp_path, "b", "x"))
    if how == "kill":  # between two calls
        os.kill(calls(tmp_path)[0][1], signal.SIGKILL)
    ended = await act(runner, tmp_path, "a", "exit", 1)
    assert "died" in ended.failed
    lost = await act(runner, tmp_path, "b", "y", 1)
    assert "was lost, and its state with it" in lost.failed
    assert (await act(runner, tmp_path, "c", "x")).observation == "c: x"


@pytest.mark.slow
@session
async def test_a_call_over_its_deadline_fails_those_that_wait_for_it(
    tmp_path: Path, runner: EpisodeRunner, settings: EnvironmentsConfig
) -> None:
    runner._settings = settings.model_copy(update={"timeout_s": 3.0})
    hung = await act(runner, tmp_path, "a", "x")
    assert "timeout: no result within 3 s" in hung.failed
    (tmp_path / "gate").touch()
    runner._settings = settings
    assert (await act(runner, tmp_path, "b", "x")).observation == "b: x"


@session
async def test_an_abandoned_episode_is_closed_and_disturbs_no_other(
    tmp_path: Path, runner: EpisodeRunner
) -> None:
    acting = [asyncio.ensure_future(act(runner, tmp_path, name, "x")) for name in "ab"]
    while not runner._hosts or not next(iter(runner._hosts.values()))._host.is_live("all"):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    acting[0].cancel()
    ended = asyncio.ensure_future(runner.end("a"))
    await asyncio.sleep(0.05)
    (tmp_path / "gate").touch()
    assert (await acting[1]).observation == "b: x"
    await ended
    assert (tmp_path / "closed").read_text() == "a\n"


@pytest.mark.slow
@session
async def test_what_episodes_share_is_loaded_once_before_them(tmp_path: Path, runner: EpisodeRunner) -> None:
    file = tmp_path / "file"
    file.write_text("known")
    loaded = Task("together:Loaded", {"file": str(file)})
    observed = await asyncio.gather(
        *(runner.act(f"e{i}", loaded, Problem("", ""), Action("?"), turn=0) for i in range(3))
    )
    assert [o.observation for o in observed] == ["known"] * 3
    assert file.read_text() == "knownx"
    missing = Task("together:Loaded", {"file": str(tmp_path / "absent")})
    failed = await runner.act("f", missing, Problem("", ""), Action("?"), turn=0)
    assert "FileNotFoundError" in failed.failed
