"""Guarantees: a user's environment runs in a process per episode; its failures cost one sample."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.config import EnvironmentsConfig
from grpo_dist.environments import runner as module
from grpo_dist.environments.base import Problem
from grpo_dist.environments.episode import Action, Call, Observed
from grpo_dist.environments.runner import EnvironmentProbe, EpisodeRunner, StartFailed, UnknownEpisode
from grpo_dist.environments.sandbox.host import ProcessFailure, ProcessHost
from grpo_dist.errors import UserError
from grpo_dist.types import Task
from tests.support.patience import HANG_S

_CODE = '''
import asyncio, os, time
from grpo_dist.environments.base import Environment, Step
from grpo_dist.environments.builtin import calculator, python


class Guess(Environment):
    """Is told whether its guesses are too low."""

    def __init__(self, most: int = 3) -> None:
        self.left = most

    def start(self, problem):
        self.number = int(problem.answer)
        if problem.text == "impossible":
            raise KeyError("no number")
        return f"Guess a number. {problem.text}"

    def step(self, action):
        self.left -= 1
        if action == "raise":
            raise RuntimeError("broken")
        if action == "hang":
            time.sleep(1000)
        if action == "die":
            os._exit(3)
        if action == "nothing":
            return Step()
        if action == "wrong type":
            return "text"
        if action == "image":
            return Step([{"role": "user", "content": [{"type": "image", "image": "a.png"}]}])
        if action == "parts":
            parts = [{"type": "text", "text": "2 "}, {"type": "text", "text": "left"}]
            return Step([{"role": "user", "content": parts}])
        if int(action) == self.number:
            return Step("right", reward=1.0, done=True)
        return Step(f"{self.left} left", reward=0.0, done=self.left == 0)

    @classmethod
    def problems(cls, split, count):
        for i in range(count or 1200):
            yield {"problem": f"{split} {i}", "answer": str(i)}


class Chat(Environment):
    async def start(self, problem):
        await asyncio.sleep(0)
        return [{"role": "system", "content": "S"}, {"role": "user", "content": problem.text}]

    async def step(self, action):
        await asyncio.sleep(0)
        return Step([{"role": "user", "content": action.upper()}])


def where() -> int:
    """Return the process."""
    return os.getpid()


async def double(x: int) -> int:
    """Double it."""
    await asyncio.sleep(0)
    return 2 * x


def misbehave(how: str) -> str:
    """Misbehave."""
    if how == "hang":
        time.sleep(1000)
    if how == "die":
        os._exit(3)
    if how == "memory":
        raise MemoryError
    raise ValueError("as asked")


class Tools(Environment):
    tools = [double, where, misbehave, calculator, python]


class Notes(Environment):
    def __init__(self, first: str = "") -> None:
        self.notes = [first]

    async def note(self, text: str) -> list[str]:
        """Note a text."""
        self.notes.append(text)
        return self.notes

    tools = [note]


class State(Tools):
    def step(self, action):
        return Step("on")


class Closing(Environment):
    def __init__(self, log: str) -> None:
        self.log = log

    def start(self, problem):
        self.name = problem.text
        return problem.text

    def step(self, action):
        if action == "hang":
            open(self.log + ".acts", "w").close()
            time.sleep(1000)
        return Step("on")

    async def close(self):
        await asyncio.sleep(0)
        with open(self.log, "a") as log:
            log.write(f"{self.name} ")


class Plain:
    pass
'''
_PROBLEM = Problem("below 10", "7")


@dataclass
class _Ran:
    output: str
    outcome: str = "ok"
    seconds: float = 0.5


class _FakeSandbox:
    """Answers with the code it was given."""

    def __init__(self, settings: object) -> None:
        self.ended: list[str] = []

    async def start(self) -> list[str]:
        return ["a note"]

    async def run(self, episode: str, code: str) -> _Ran:
        return _Ran(f"ran {code}")

    async def end(self, episode: str) -> None:
        self.ended.append(episode)

    async def close(self) -> None: ...


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EnvironmentsConfig:
    (tmp_path / "guessing.py").write_text(_CODE)
    monkeypatch.setattr(module, "PythonSandbox", _FakeSandbox)
    return EnvironmentsConfig(code_paths=(str(tmp_path),), timeout_s=60.0)


@pytest.fixture
def runner(settings: EnvironmentsConfig) -> EpisodeRunner:
    episodes = EpisodeRunner(settings)
    asyncio.run(episodes.start())
    return episodes


def session(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an asynchronous test, then close its runner."""

    @wraps(test)
    def run(runner: EpisodeRunner, **arguments: Any) -> None:
        async def run_and_close() -> None:
            try:
                await test(runner=runner, **arguments)
            finally:
                await runner.close()

        asyncio.run(run_and_close())

    return run


@contextmanager
def _short(runner: EpisodeRunner) -> Iterator[None]:
    """Give actions a second: none of them ends."""
    patient = runner._settings
    runner._settings = patient.model_copy(update={"timeout_s": 1.0})
    try:
        yield
    finally:
        runner._settings = patient


def _task(name: str, **kwargs: Any) -> Task:
    return Task(f"guessing:{name}" if name[0].isupper() else name, kwargs)


def _calls(*calls: tuple[str, str]) -> Action:
    return Action("", tuple(Call(*call) for call in calls))


async def _acts(runner: EpisodeRunner, episode: str, task: Task, *actions: Action | str) -> list[Observed]:
    observations = []
    for turn, action in enumerate(actions):
        action = Action(action) if isinstance(action, str) else action
        observations.append(await runner.act(episode, task, _PROBLEM, action, turn=turn))
    return observations


@pytest.mark.slow
@session
async def test_an_episode_keeps_its_state_and_others_have_their_own(runner: EpisodeRunner) -> None:
    one, two = await asyncio.gather(
        _acts(runner, "a", _task("Guess"), "1", "2", "7"),
        _acts(runner, "b", _task("Guess", most=2), "1", "2"),
    )
    assert one == [Observed("2 left", reward=0.0), Observed("1 left", reward=0.0),
                   Observed("right", reward=1.0, done=True)]  # fmt: skip
    assert two == [Observed("1 left", reward=0.0), Observed("0 left", reward=0.0, done=True)]


@pytest.mark.parametrize(("action", "reason"), [
    ("raise", "RuntimeError: broken (/"),  # with file and line
    ("die", "died"),
    ("nothing", "neither an observation nor done=True"),
    ("wrong type", "step returned a str, expected a Step"),
    ("image", "expected text, or messages of role and content, which is text or a list of text parts"),
])  # fmt: skip
@session
async def test_an_environment_that_fails_gives_the_reason_and_others_continue(
    runner: EpisodeRunner, action: str, reason: str
) -> None:
    await runner.act("other", _task("Guess"), _PROBLEM, Action("1"), turn=0)
    (failed,) = await _acts(runner, "a", _task("Guess"), action)
    assert reason in failed.failed and "guessing:Guess" in failed.failed
    assert not failed.done and failed.reward is None
    other = await runner.act("other", _task("Guess"), _PROBLEM, Action("7"), turn=1)
    assert other.done and other.reward == 1.0


@session
async def test_text_parts_of_a_message_are_one_text(runner: EpisodeRunner) -> None:
    (observed,) = await _acts(runner, "a", _task("Guess"), "parts")
    assert observed == Observed(({"role": "user", "content": "2 left"},))


@session
async def test_an_environment_that_hangs_fails_at_its_deadline(runner: EpisodeRunner) -> None:
    (first,) = await _acts(runner, "a", _task("Guess"), "1")
    with _short(runner):
        failed = await runner.act("a", _task("Guess"), _PROBLEM, Action("hang"), turn=1)
    assert not first.failed and "timeout" in failed.failed


@session
async def test_state_that_died_is_a_failure_and_not_a_fresh_start(runner: EpisodeRunner) -> None:
    observations = await _acts(runner, "a", _task("Guess"), "1", "die", "7")
    assert observations[2].failed and "lost" in observations[2].failed


@pytest.mark.slow
@session
async def test_tools_are_called_with_checked_arguments(runner: EpisodeRunner) -> None:
    action = _calls(("double", '{"x": 21}'), ("calculator", '{"expression": "1/0"}'), ("double", "{}"),
                    ("nothing", "{}"), ("double", "{"), ("misbehave", '{"how": "memory"}'))  # fmt: skip
    (observed,) = await _acts(runner, "a", _task("Tools"), action)
    assert [(call.result.split(":")[0], call.outcome) for call in observed.calls] == [
        ("42", "ok"),
        ("ValueError", "error"),
        ("double", "malformed"),
        ("there is no tool `nothing`; there are", "unknown"),
        ("the arguments are not valid JSON (Expecting property name enclosed in double quotes", "malformed"),
        ("out of memory", "memory"),
    ]
    assert observed.calls[0].name == "double" and observed.calls[0].arguments == '{"x": 21}'
    assert not observed.done and not observed.failed
    (answer,) = await _acts(runner, "b", _task("Tools"), "the answer")
    assert answer == Observed(done=True)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "outcome"), [("die", "died"), ("hang", "timeout")])
@session
async def test_a_tool_that_ends_its_process_is_an_outcome_where_nothing_is_lost(
    runner: EpisodeRunner, how: str, outcome: str
) -> None:
    bad, good = _calls(("misbehave", f'{{"how": "{how}"}}')), _calls(("double", '{"x": 1}'))

    async def misbehaves(runner: EpisodeRunner, episode: str, task: Task) -> Observed:
        (first,) = await _acts(runner, episode, task, good)  # its process is there
        assert first.calls[0].result == "2"
        with _short(runner) if how == "hang" else nullcontext():
            return await runner.act(episode, task, _PROBLEM, bad, turn=1)

    lost = await misbehaves(runner, "a", _task("Tools"))
    second = await runner.act("a", _task("Tools"), _PROBLEM, good, turn=2)
    assert lost.calls[0].outcome == outcome and second.calls[0].result == "2"
    stateful = await misbehaves(runner, "b", _task("State"))
    assert outcome in stateful.failed


@session
async def test_a_tool_that_is_a_method_has_the_state_of_its_episode(runner: EpisodeRunner) -> None:
    """Which is lost with its process: no further call finds another, empty one."""
    task, again = _task("Notes", first="a"), _calls(("note", '{"text": "c"}'))
    for episode in ("one", "other"):
        (observed,) = await _acts(runner, episode, task, _calls(("note", '{"text": "b"}')))
        assert [(call.result, call.outcome) for call in observed.calls] == [('["a", "b"]', "ok")]
    observed = await runner.act("one", task, _PROBLEM, again, turn=1)
    assert observed.calls[0].result == '["a", "b", "c"]'
    (tool,) = (await runner._episodes["one"].host.ask("one", "describe", {}, timeout_s=HANG_S))["tools"]
    assert tool["function"]["parameters"]["required"] == ["text"]
    host = runner._episodes["one"].host
    await host.end("one")
    assert "its state with it" in (await runner.act("one", task, _PROBLEM, again, turn=2)).failed


@session
async def test_code_of_the_policy_goes_to_the_sandbox_and_never_to_the_environment(
    runner: EpisodeRunner,
) -> None:
    for task in (_task("Tools"), _task("python")):
        action = Action("", (Call("python", "print(1)", raw=True),))
        (observed,) = await _acts(runner, task.environment, task, action)
        assert observed.calls[0].result == "ran print(1)" and observed.calls[0].seconds == 0.5
        await runner.end(task.environment)
    assert runner._sandbox.ended == ["guessing:Tools", "python"]


@session
async def test_a_failure_of_the_machine_fails_the_episode_and_is_no_result_of_a_tool(
    runner: EpisodeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(self: object, episode: str, *request: Any, **_: Any) -> Any:
        if request[0] == "describe":
            return {"stateless": True}
        raise ProcessFailure("died", "no space left", infrastructure=True)

    monkeypatch.setattr(_FakeSandbox, "run", fail)
    action = Action("", (Call("python", "print(1)", raw=True),))
    (observed,) = await _acts(runner, "a", _task("python"), action)
    assert observed.failed == "python: died: no space left"
    monkeypatch.setattr(ProcessHost, "ask", fail)
    (observed,) = await _acts(runner, "b", _task("Tools"), action)
    assert observed.failed == "guessing:Tools: died: no space left"


@pytest.mark.slow
@session
async def test_the_real_interpreter_keeps_its_state_over_the_turns_of_an_episode(
    runner: EpisodeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    await runner.start()

    def run(code: str) -> Action:
        return Action("", (Call("python", code, raw=True),))

    task = _task("python")
    first, second, wrong = await _acts(runner, "a", task, run("x = 6"), run("x * 7"), run("1 / 0"))
    assert (second.calls[0].result.strip(), second.calls[0].outcome) == ("42", "ok")
    assert first.calls[0].outcome == "ok" and "ZeroDivisionError" in wrong.calls[0].result
    assert wrong.calls[0].outcome == "error"
    (other,) = await _acts(runner, "b", task, run("x"))
    assert "NameError" in other.calls[0].result
    (answer,) = await _acts(runner, "c", task, "The answer is 42.")
    assert answer == Observed(done=True)


@session
async def test_a_malformed_action_is_answered_and_not_run(runner: EpisodeRunner) -> None:
    (observed,) = await _acts(runner, "a", _task("calculator"), Action("x", malformed="not closed"))
    (call,) = observed.calls
    assert (call.outcome, call.result, observed.done) == ("malformed", "not closed", False)


@session
async def test_user_code_runs_in_a_process_of_its_own(runner: EpisodeRunner) -> None:
    where = _calls(("where", "{}"))
    episodes = [await _acts(runner, episode, _task("Tools"), where, where) for episode in "ab"]
    (a, again), (b, _) = [[o.calls[0].result for o in turns] for turns in episodes]
    assert a == again and len({a, b, str(__import__("os").getpid())}) == 3


@session
async def test_a_later_turn_of_an_unknown_episode_is_refused(runner: EpisodeRunner) -> None:
    with pytest.raises(UnknownEpisode):
        await runner.act("a", _task("calculator"), _PROBLEM, Action("1"), turn=1)
    await runner.end("never seen")


@session
async def test_no_process_is_started_to_close_an_episode_whose_action_was_cancelled(
    runner: EpisodeRunner, tmp_path: Path
) -> None:
    log = str(tmp_path / "closed")
    task = asyncio.ensure_future(_acts(runner, "a", _task("Closing", log=log), "hang"))
    while not (tmp_path / "closed.acts").exists():
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await runner.end("a")
    (host,) = runner._hosts.values()
    assert host._count == 1  # processes


@pytest.mark.slow
@session
async def test_an_episode_that_has_started_finds_its_process_there(runner: EpisodeRunner) -> None:
    """Also one that ends before it acts; its first action reports what failed in between."""
    task, problem = Task("guessing:Guess"), Problem("?", "7")
    await asyncio.gather(*(runner.begin(name, task, problem) for name in ("a", "never acts")))
    host = runner._hosts["guessing:Guess {}"]
    assert isinstance(host, ProcessHost) and host.is_live("a") and host.is_live("never acts")
    pid = host._live["a"].number
    await runner.end("never acts")
    observed = await runner.act("a", task, problem, Action("7"), turn=0)
    assert (observed.reward, observed.done) == (1.0, True) and host._live["a"].number == pid
    assert not host.is_live("never acts")
    await runner.begin("broken", Task("guessing:Absent"), problem)
    failed = await runner.act("broken", Task("guessing:Absent"), problem, Action("7"), turn=0)
    assert "no such class" in failed.failed
    await runner.begin("builtin", Task("calculator"), problem)
    assert (await runner.act("builtin", Task("calculator"), problem, Action("x"), turn=0)).done


@pytest.mark.parametrize("acts_again", [False, True])
@session
async def test_an_episode_that_ends_while_its_process_starts_leaves_none(
    runner: EpisodeRunner, acts_again: bool
) -> None:
    """Also if the import is slow. An episode of the same name that begins meanwhile keeps its process."""
    task = _task("Guess")
    starting = asyncio.create_task(runner.begin("a", task, _PROBLEM))
    await asyncio.sleep(0)  # it waits for the process that imports the environment
    host = runner._hosts["guessing:Guess {}"]
    assert isinstance(host, ProcessHost) and not host.is_live("a")
    await runner.end("a")
    if acts_again:
        (answered,) = await _acts(runner, "a", task, "7")
        assert answered.done
    await starting
    assert host.is_live("a") == acts_again


@session
async def test_a_code_path_that_is_gone_fails_one_sample_and_not_its_worker(runner: EpisodeRunner) -> None:
    runner._settings = runner._settings.model_copy(update={"code_paths": ("/no/such",)})
    (failed,) = await _acts(runner, "a", _task("Guess"), "1")
    assert "/no/such" in failed.failed and "guessing:Guess" in failed.failed
    await runner.end("a")


def _probe(settings: EnvironmentsConfig, name: str, **kwargs: Any) -> EnvironmentProbe:
    return EnvironmentProbe(name, kwargs, settings)


@pytest.mark.slow
def test_preparation_learns_what_an_environment_asks_and_has(settings: EnvironmentsConfig) -> None:
    described, questions = _probe(settings, "guessing:Guess").questions([_PROBLEM, Problem("x", "1")])
    assert questions == ["Guess a number. below 10", "Guess a number. x"]
    assert described.asks and described.has_problems and not described.stateless and not described.tools
    described, questions = _probe(settings, "guessing:Tools").questions([_PROBLEM])
    names = [tool["function"]["name"] for tool in described.tools]
    assert names == ["double", "where", "misbehave", "calculator", "python"]
    assert questions == ["below 10"] and described.sandboxed and described.stateless


@pytest.mark.slow
def test_preparation_closes_the_environment_of_every_problem(
    settings: EnvironmentsConfig, tmp_path: Path
) -> None:
    log = tmp_path / "closed"
    _probe(settings, "guessing:Closing", log=str(log)).questions([_PROBLEM, Problem("x", "1")])
    assert log.read_text() == "below 10 x "


@pytest.mark.slow
def test_an_environment_may_bring_its_own_problems(settings: EnvironmentsConfig) -> None:
    probe = _probe(settings, "guessing:Guess")
    rows = probe.environment_problems("test", 3)
    assert rows == [{"problem": f"test {i}", "answer": str(i)} for i in range(3)]
    assert len(probe.environment_problems("test", None)) == 1200
    with pytest.raises(ValueError, match="provides no problems"):
        _probe(settings, "guessing:Chat").environment_problems("train", None)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "words"), [
    ("guessing:Nothing", "no such class `Nothing`"),
    ("guessing:Plain", "not a subclass of Environment"),
    ("nowhere:Class", "`nowhere` cannot be imported.*code_paths"),
])  # fmt: skip
def test_an_environment_that_cannot_be_loaded_is_refused(
    settings: EnvironmentsConfig, name: str, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        _probe(settings, name).describe()


def test_a_start_that_fails_names_its_row(settings: EnvironmentsConfig) -> None:
    with pytest.raises(StartFailed) as failed:
        _probe(settings, "guessing:Guess").questions([_PROBLEM, Problem("impossible", "3")])
    assert failed.value.index == 1 and "no number" in failed.value.reason
    assert failed.value.reason.endswith(" in start)") and "guessing.py:" in failed.value.reason


def test_wrong_arguments_of_an_environment_are_refused(settings: EnvironmentsConfig) -> None:
    with pytest.raises(StartFailed, match="least"):
        _probe(settings, "guessing:Guess", least=3).questions([_PROBLEM])


@pytest.mark.parametrize("backend", ["http", "process"])
def test_a_sandbox_that_runs_no_code_is_one_sentence_with_its_key(monkeypatch, backend):
    monkeypatch.setattr("grpo_dist.environments.sandbox.service._FIRST_PAUSE_S", 0.001)

    async def fails():
        raise RuntimeError("the trial of the sandbox failed: no fork")

    monkeypatch.setattr("grpo_dist.environments.sandbox.python.find_isolation", fails)
    sandbox = {"url": "http://127.0.0.1:9"} if backend == "http" else {}
    runner = EpisodeRunner(EnvironmentsConfig.model_validate({"sandbox": sandbox}))
    words = {
        "http": r"`environments.sandbox.url` = http://127.0.0.1:9: no code can be run \(.*ConnectError",
        "process": r"`environments.sandbox`: no code can be run \(the trial of the sandbox failed: no fork\)",
    }
    with pytest.raises(UserError, match=words[backend]):
        asyncio.run(runner.start())
