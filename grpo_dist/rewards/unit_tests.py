"""A reward for code: runs tests from the data in the sandbox that also runs the tools of episodes.

a test                            what runs, in a separate sandbox                 it passes
"assert f(2) == 4"                the solution, then the test, in one interpreter  if the test ends
{"input": "2\\n", "output": "4"}   `python solution.py < input`                     if it prints the output
{"input": "2", "output": "4",     the solution, then f(2) or Solution().f(2), in   if it returns the output
 "testtype": "functional",        one interpreter, with LeetCode's imports
 "metadata": {"func_name": "f"}}

An assertion or a call runs in the process of the solution, which could tamper with it; output is compared
outside. A program runs as a separate process, because only the end of a process joins threads, runs atexit
handlers and flushes open files.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import secrets
from collections.abc import Coroutine, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt, PrivateAttr

from grpo_dist.config.environments import SandboxConfig
from grpo_dist.environments.sandbox.host import ProcessFailure
from grpo_dist.environments.sandbox.python import CodeResult, PythonSandbox
from grpo_dist.rewards.builtin import Builtin, Note
from grpo_dist.rewards.group import CompletionGroup, Verdicts
from grpo_dist.runtime.concurrency import LoopThread

_FENCED = re.compile(r"^([ \t]*)```[ \t]*+(\w*+)[^\n]*+\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_LANGUAGES = ("", "python", "python3", "py")
_REASON = 200  # last characters of a failure's output in messages
_TRIALS = (
    ("def f(x): return 2 * x", "assert f(2) == 4"),
    ("print(2 * int(input()))", {"input": "2", "output": "4"}),
)
_START_S, _CLOSE_S = 400.0, 60.0  # the trial of isolation takes up to 300 s on a busy machine
# Drops stderr: the sandbox merges both streams, and a program's logs are no output.
_PREPARE = """import os, subprocess, sys, tempfile
directory = tempfile.mkdtemp()
for name, data in {files!r}.items():
    with open(os.path.join(directory, name), "wb") as file:
        file.write(data)
"""
_RUN = """with open(os.path.join(directory, "input"), "rb") as file:
    command = [sys.executable, "-X", "utf8", "-c", {begin!r}, directory]
    try:
        status = subprocess.run(command, stdin=file, stderr=subprocess.DEVNULL).returncode
    except OSError as error:
        status = {mark!r} + str(error)
sys.exit(status)
"""
# Shares the names of the setup code with the solution, drops the setup's output, and seeds random numbers.
_BEGIN = """def _begin(directory):
    import os, random, sys
    names = globals()
    def run(name):
        names["__file__"] = sys.argv[0] = os.path.join(directory, name)
        with open(names["__file__"], encoding="utf-8") as file:
            code = compile(file.read(), file.name, "exec", dont_inherit=True)
        return lambda: exec(code, names)
    del names["_begin"], sys.argv[1:]
    random.seed(0)
    output, nothing = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    run("setup.py")()
    sys.stdout.flush()
    os.dup2(output, 1)
    os.close(output)
    os.close(nothing)
    run("solution.py")()
_begin(__import__("sys").argv[1])
"""
# The imports of LeetCode, whose problems begin solutions with `def f(self, x: List[int])`.
_MODULES = (
    "typing", "sys", "re", "string", "copy", "math", "random", "datetime", "collections", "heapq", "bisect",
    "itertools", "functools", "operator", "builtins",
)  # fmt: skip
_IMPORTS = "".join(f"from {name} import *\n" for name in _MODULES) + f"import {', '.join(_MODULES)}\n"
# Both sides are JSON, which has no tuples.
_CALL = """import json as _json
_function = getattr(Solution(), {function!r}) if "Solution" in globals() else globals()[{function!r}]
_result = _function(*map(_json.loads, {arguments!r}))
assert _json.loads(_json.dumps(_result)) == _json.loads({output!r})
"""


class UnitTests(Builtin):
    """1 if the last Python block of the completion passes all tests, else 0, also without a block; with
    ``reward: share`` the share of passed tests. NaN if the sandbox failed, the row has no tests, or a test
    expects more output than is kept.
    """

    knows_right_answers: ClassVar[bool] = False

    column: str = Field("tests", description="column of the data with the tests, a list or its JSON")
    setup_column: str | None = Field(None, description="column of code that runs before the solution")
    reward: Literal["all", "share"] = Field("all", description="all: 1 or 0; share: of the tests that pass")
    output_kb: PositiveInt = Field(4096, description="output of a program that is compared, KiB")
    max_concurrency: PositiveInt = Field(4, description="concurrent interpreters of one reward worker")
    sandbox: SandboxConfig = SandboxConfig()

    _code: _CodeLoop = PrivateAttr()
    _note: Note = PrivateAttr()

    @property
    def is_graded(self) -> bool:
        return self.reward == "share"

    @property
    def data_columns(self) -> tuple[str, ...]:
        return (self.column, self.setup_column) if self.setup_column else (self.column,)

    def check_row(self, columns: Mapping[str, Any]) -> None:
        read_tests(columns[self.column], self.column)

    def check(self, *, max_new_tokens: int) -> None:
        """Run a test of each kind, so that a machine without a sandbox is reported before the run starts."""
        code = _CodeLoop(self.sandbox, 1, self.output_kb)
        try:
            code.start()
            passed = [code.run(_passed_all(solution, [test], code)) for solution, test in _TRIALS]
        except (ProcessFailure, OSError, RuntimeError, TimeoutError) as error:
            raise ValueError(
                f"kwargs.sandbox: no code can be run here ({error}); see grpo_dist/environments/sandbox, or "
                "set kwargs.sandbox.url to the address of a service"
            ) from error
        finally:
            code.close()
        if passed != [[True]] * len(_TRIALS):
            raise ValueError("kwargs.sandbox: a right solution fails its test; raise its limits")

    def start(self, *, workers: int, note: Note) -> None:
        self._note, self._code = note, _CodeLoop(self.sandbox, self.max_concurrency, self.output_kb)
        self._code.start()

    def score(self, group: CompletionGroup, verdicts: Verdicts) -> list[float]:
        try:
            tests = read_tests(group.columns.get(self.column), self.column)
            _check_lengths(tests, self.sandbox, self.output_kb)
        except ValueError as error:
            self._note(str(error))
            return [math.nan] * len(group.completions)
        setup = str(group.columns.get(self.setup_column) or "") if self.setup_column else ""
        solutions = [last_block(text) for text in group.outside_thoughts]
        distinct = list(dict.fromkeys(code for code in solutions if code is not None))
        scores = self._code.run(self._scores(distinct, tests, setup))
        score_of = dict(zip(distinct, scores, strict=True))
        return [0.0 if code is None else score_of[code] for code in solutions]

    def close(self) -> None:
        self._code.close()

    async def _scores(self, solutions: Sequence[str], tests: Sequence[Any], setup: str) -> list[float]:
        return list(await asyncio.gather(*(self._score_of(code, tests, setup) for code in solutions)))

    async def _score_of(self, solution: str, tests: Sequence[Any], setup: str) -> float:
        try:
            passed = await _passed_all(solution, tests, self._code, setup=setup, stop=self.reward == "all")
        except ProcessFailure as failure:  # the machine or the service failed, so the result is unknown
            self._note(f"the sandbox failed: {failure}")
            return math.nan
        except _SetupFailed as failure:
            self._note(f"column {self.setup_column}: {failure}; expected code that runs by itself")
            return math.nan
        return float(all(passed)) if self.reward == "all" else sum(passed) / len(tests)


def last_block(text: str) -> str | None:
    """Return the last fenced block of Python or without a language; None without a block.

    What the code shares with an indented fence, as in an item of a list, is removed: other indentation means
    the body of the setup's header, see `_pieces`.
    """
    blocks = [block for block in _FENCED.finditer(text) if block[2].lower() in _LANGUAGES]
    if not blocks:
        return None
    fence, _, code = blocks[-1].groups()
    indentations = [len(line) - len(line.lstrip(" \t")) for line in code.split("\n") if line.strip()]
    return re.sub(rf"(?m)^[ \t]{{0,{min([len(fence), *indentations])}}}", "", code)


def read_tests(value: Any, column: str) -> list[str | dict[str, str]]:
    """Read the tests of a row. Raises ValueError for other values."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:  # one test, as in HumanEval
            value = [value] if value.strip() else None
    tests = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    for test in tests:
        pair = isinstance(test, Mapping) and all(isinstance(test.get(k), str) for k in ("input", "output"))
        if not pair and not isinstance(test, str):
            tests = []
    if not tests:
        raise ValueError(
            f"column {column} has no tests; expected a list of assertions or of {{input, output}}, in "
            "`columns` of the data and `kwargs.column`"
        )
    return [test if isinstance(test, str) else _read_pair(test, column) for test in tests]


def _read_pair(test: Mapping[str, Any], column: str) -> dict[str, str]:
    """Return ``input``, ``output`` and, if the test calls a function, its name as ``function``.

    The kind is LiveCodeBench's `testtype`, or `type` in other data. Raises ValueError for calls that cannot
    be made.
    """
    kind = test.get("testtype") or test.get("type")
    metadata = test.get("metadata")
    function = metadata.get("func_name") if isinstance(metadata, Mapping) else test.get("fn_name")
    pair = {"input": test["input"], "output": test["output"]}
    is_call = kind in ("functional", "function_call") or bool(function)  # `type` may be "public", too
    if not is_call:
        return pair
    is_json = all(map(_is_json, [*_arguments(pair), pair["output"]]))
    if kind not in ("stdin", "stdin_stdout", "function_call") and isinstance(function, str) and is_json:
        return pair | {"function": function}
    raise ValueError(
        f"column {column}: a test has testtype {kind!r} and metadata.func_name {function!r}; expected "
        "`stdin` without a function, or `functional` with one, a JSON argument per line of `input`, and the "
        "result as JSON in `output`"
    )


def _arguments(test: Mapping[str, str]) -> list[str]:
    return [line for line in test["input"].split("\n") if line.strip()]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _check_lengths(tests: Sequence[Any], limits: SandboxConfig, output_kb: int) -> None:
    """Raise ValueError for an expected output above the output limit, or an input above the file limit."""
    pairs = [test for test in tests if not isinstance(test, str) and "function" not in test]
    longest = {
        key: max((len(pair[key].encode(errors="replace")) for pair in pairs), default=0)
        for key in ("input", "output")
    }
    if longest["output"] > output_kb * 1024:
        raise ValueError(
            f"a test expects {-(-longest['output'] // 1024)} KiB of output, but kwargs.output_kb = "
            f"{output_kb} are kept; raise it"
        )
    if longest["input"] > limits.files_mb * 2**20:
        raise ValueError(
            f"a test has {-(-longest['input'] // 2**20)} MiB of input, but a file may have "
            f"kwargs.sandbox.files_mb = {limits.files_mb}; raise it"
        )


class _SetupFailed(Exception):
    """The data's setup code, which runs before the solution, failed; the solution is not to blame."""


async def _passed_all(
    solution: str, tests: Sequence[Any], code: _CodeLoop, *, setup: str = "", stop: bool = False
) -> list[bool]:
    """Return whether each test passes; with ``stop`` up to the first failure. Raises ProcessFailure and
    _SetupFailed.
    """
    passed: list[bool] = []
    for test in tests:
        async with code.permits:
            passed.append(await _passes(solution, test, code.sandbox, setup))
        if stop and not passed[-1]:
            break
    return passed


async def _passes(solution: str, test: str | Mapping[str, str], sandbox: PythonSandbox, setup: str) -> bool:
    setup, solution = _pieces(setup, solution)
    preparation = [setup]
    if not isinstance(test, str) and "function" in test:
        preparation = [_IMPORTS, setup]
        test = _CALL.format(function=test["function"], arguments=_arguments(test), output=test["output"])
    episode = secrets.token_hex(8)
    try:
        for code in filter(None, preparation):
            if (ran := await sandbox.run(episode, _sendable(code))).outcome != "ok":
                raise _SetupFailed(f"{ran.outcome} {ran.output.strip()[-_REASON:]}".rstrip())
        if isinstance(test, str):
            if _begun(await sandbox.run(episode, _sendable(solution))).outcome != "ok":
                return False
            # Printed after the test, so a solution that exits during the test does not pass.
            mark = secrets.token_hex(16)
            ran = _begun(await sandbox.run(episode, _sendable(f"{test}\nprint({mark!r})\n")))
            return ran.outcome == "ok" and ran.output.rstrip().endswith(mark)
        files = {"setup.py": setup, "solution.py": solution, "input": test["input"]}
        data = {name: _sendable(text).encode() for name, text in files.items()}
        prepared = await sandbox.run(episode, _PREPARE.format(files=data))
        if prepared.outcome != "ok":  # the program would lack its input, which is not its fault
            raise _failure("the input cannot be written", f"{prepared.outcome} {prepared.output.strip()}")
        mark = secrets.token_hex(16)
        ran = _begun(await sandbox.run(episode, _RUN.format(begin=_BEGIN, mark=mark)))
        if mark in ran.output:
            raise _failure("no program can be started", ran.output.partition(mark)[2].strip())
        return ran.outcome == "ok" and _same_output(ran, test["output"])
    finally:
        await sandbox.end(episode)


def _pieces(setup: str, solution: str) -> tuple[str, str]:
    """Return the code to run first and the code to run second. They are separate, since a solution may begin
    with an import from __future__, and output of ``setup`` does not count. An indented solution is the body
    of ``setup``'s header, so both run together.
    """
    lines = [line for line in solution.splitlines() if line.strip()]
    if lines and lines[0][0].isspace():
        return "", f"{setup}\n{solution}"
    return setup, solution


def _begun(ran: CodeResult) -> CodeResult:
    """Raise ProcessFailure where the machine lost the interpreter between two pieces of code."""
    if not ran.began:
        raise ProcessFailure("died", "it lost an interpreter between two calls", infrastructure=True)
    return ran


def _failure(what: str, reason: str) -> ProcessFailure:
    detail = f"{what}: {reason[-_REASON:]}".rstrip()
    return ProcessFailure("error", detail, lost=False, infrastructure=True)


def _same_output(ran: CodeResult, expected: str) -> bool:
    """Compare line by line, ignoring white space at the ends of lines and of the text. Lines of numbers are
    compared by value: "0.50 1" equals "0.5  1", as in LiveCodeBench.
    """
    ours, theirs = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (ran.output, expected))
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def _same_line(ours: str, theirs: str) -> bool:
    if ours == theirs:
        return True
    try:
        return [Decimal(word) for word in ours.split()] == [Decimal(word) for word in theirs.split()]
    except InvalidOperation:  # not all words are numbers
        return False


def _sendable(code: str) -> str:
    """Replace lone surrogates, which UTF-8 files cannot contain."""
    return code.encode(errors="replace").decode()


class _CodeLoop:
    """The sandbox on an event loop in a separate thread, for synchronous callers."""

    def __init__(self, settings: SandboxConfig, concurrency: int, output_kb: int) -> None:
        self.sandbox = PythonSandbox(settings, output_kb=output_kb)
        self.permits = asyncio.Semaphore(concurrency)
        self._loop = LoopThread("unit-tests")

    def start(self) -> None:
        self._loop.submit(self.sandbox.start()).result(_START_S)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.submit(coroutine).result()  # bounded: by the limits of the sandbox on each call

    def close(self) -> None:
        try:
            self._loop.submit(self.sandbox.close()).result(_CLOSE_S)
        finally:
            self._loop.stop(_CLOSE_S)
