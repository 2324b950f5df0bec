"""The Python tool on both backends: variables stay, a last expression is shown, and limits are outcomes."""

import asyncio
import json
import os
import re
from contextlib import asynccontextmanager
from functools import wraps

import pytest

from grpo_dist.config.environments import SandboxConfig
from grpo_dist.environments.sandbox import python, service
from grpo_dist.environments.sandbox.cells import Cells
from grpo_dist.environments.sandbox.frames import KeptOutput
from grpo_dist.environments.sandbox.host import ProcessFailure
from grpo_dist.environments.sandbox.python import OUTPUT_KB, PythonSandbox
from tests.environments.sandbox.found import FOUND
from tests.support.patience import HANG_S, longer
from tests.support.services import sandbox_fusion

SETTINGS = SandboxConfig(call_s=HANG_S, episode_s=4 * HANG_S, cpu_s=HANG_S, memory_mb=256)


@asynccontextmanager
async def tool(backend="process", output_kb=OUTPUT_KB, **settings):
    sandbox_settings = SETTINGS.model_copy(update=settings)
    with sandbox_fusion() as fusion:
        if backend == "http":
            sandbox_settings = sandbox_settings.model_copy(update={"url": fusion.url})
        sandbox = PythonSandbox(sandbox_settings, isolation=FOUND, output_kb=output_kb)
        sandbox.fusion = fusion
        await sandbox.start()
        try:
            yield sandbox
        finally:
            await sandbox.close()


async def outputs(sandbox: PythonSandbox, *codes: str, episode: str = "a") -> list[tuple[str, str]]:
    results = [await sandbox.run(episode, code) for code in codes]
    return [(result.outcome, result.output) for result in results]


def asynchronous(test):
    """Run an asynchronous test."""
    return wraps(test)(lambda **arguments: asyncio.run(test(**arguments)))


both = pytest.mark.parametrize("backend", ["process", "http"])


@both
@asynchronous
async def test_variables_stay_over_an_episode_and_end_with_it(backend):
    async with tool(backend) as sandbox:
        results = await outputs(sandbox, "x = 2", "def f(n): return n * x", "f(21)", "import math", "math.pi")
        assert [output for _, output in results] == ["", "", "42\n", "", "3.141592653589793\n"]
        assert (await outputs(sandbox, "x", episode="b"))[0][0] == "error"
        await sandbox.end("a")
        assert (await outputs(sandbox, "f(21)"))[0][0] == "error"


@both
@asynchronous
async def test_stdout_and_stderr_are_shown_in_order_with_the_last_value_and_nothing_twice(backend):
    async with tool(backend) as sandbox:
        code = "import os, sys\nprint('a', end=' ')\nprint('b', file=sys.stderr)\nos.system('echo c')\n'd'"
        assert await outputs(sandbox, code, "print('e')\nNone", "'f'; x = 1", "_") == [
            ("ok", "a b\nc\n'd'\n"), ("ok", "e\n"), ("ok", ""), ("ok", "'d'\n"),
        ]  # fmt: skip


@both
@asynchronous
async def test_a_traceback_begins_in_the_code(backend):
    async with tool(backend) as sandbox:
        codes = ("def f(n):\n    return 1 / n", "f(0)", "1 +", "x = 5\nraise KeyError", "x")
        results = await outputs(sandbox, *codes)
        lines = [line for line in results[1][1].splitlines() if set(line) - set(" ~^")]
        assert lines == [
            "Traceback (most recent call last):", '  File "<call 2>", line 1, in <module>', "    f(0)",
            '  File "<call 1>", line 2, in f', "    return 1 / n", "ZeroDivisionError: division by zero",
        ]  # fmt: skip
        assert results[1][0] == results[2][0] == results[3][0] == "error"
        assert results[2][1].startswith('  File "<call 3>", line 1\n    1 +\n')
        assert results[2][1].endswith("SyntaxError: invalid syntax\n")
        assert results[4] == ("ok", "5\n")  # what ran before an error stays


@both
@asynchronous
async def test_the_same_code_gives_the_same_random_numbers_in_each_episode(backend):
    async with tool(backend) as sandbox:
        code = "import random\nrandom.random()"
        if backend == "process":  # the order of a set and hashes, too; a service sets their seed
            code += ", [*{'a', 'b', 'c', 'd'}], hash('text')"
        assert await outputs(sandbox, code) == await outputs(sandbox, code, episode="b")


@both
@asynchronous
async def test_a_call_over_its_deadline_loses_the_interpreter_and_reports_it(backend):
    async with tool(backend) as sandbox:
        patient = sandbox._settings
        for call_s in longer(2.0):
            await sandbox.run("a", "x = 1")
            sandbox._settings = patient.model_copy(update={"call_s": call_s})
            result = await sandbox.run("a", "print('begun', flush=True)\nimport time\ntime.sleep(900)")
            sandbox._settings = patient
            if result.output.startswith("begun\n"):
                break
        assert result.outcome == "timeout"
        assert result.output.startswith(f"begun\n[no result within {call_s:g} s. ")
        assert "variables and files of earlier calls are gone" in result.output
        assert (await sandbox.run("a", "x")).outcome == "error"


@both
@asynchronous
async def test_a_process_that_ends_is_an_outcome_that_is_named(backend):
    async with tool(backend) as sandbox:
        result = await sandbox.run("a", "import os\nos._exit(7)")
        assert result.outcome == "died" and "exit status 7" in result.output and "are gone" in result.output
        assert await outputs(sandbox, "6 * 7") == [("ok", "42\n")]


@both
@asynchronous
async def test_memory_is_an_outcome_and_variables_stay(backend):
    async with tool(backend) as sandbox:
        results = await outputs(sandbox, "x = 1", "raise MemoryError('too much')", "x")
        assert [outcome for outcome, _ in results] == ["ok", "memory", "ok"]


@both
@asynchronous
async def test_an_episode_has_a_time_limit(backend):
    async with tool(backend, episode_s=1.5) as sandbox:
        results = [await sandbox.run("a", "import time; time.sleep(0.8)") for _ in range(4)]
        outcomes = [result.outcome for result in results]
        assert outcomes[-1] == "timeout"
        assert "no time is left for calls of this episode: 1.5 s" in results[-1].output
        assert outcomes == sorted(outcomes)  # "ok" until it is over
        assert sandbox._used_s["a"] < 60


@asynchronous
async def test_cpu_time_over_the_episode_is_a_timeout_also_in_children():
    async with tool(cpu_s=1.0) as sandbox:
        code = "import os, time\nfor _ in range(3):\n  if not os.fork():\n    while True: pass"
        code += "\ntime.sleep(900)"
        for episode, program in (("a", code), ("b", "while True: pass")):
            result = await sandbox.run(episode, program)
            assert result.outcome == "timeout" and "more than 1 s of CPU time" in result.output


@pytest.mark.slow
@asynchronous
async def test_an_interpreter_that_is_lost_between_two_calls_is_reported_before_another_begins():
    """It ends with its zygote: the code does not run, and the policy reads why."""
    async with tool() as sandbox:
        host = sandbox._backend._host
        assert await outputs(sandbox, "x = 2", "x") == [("ok", ""), ("ok", "2\n")]
        zygote = host._child
        zygote.kill()
        while host._child is zygote:
            await asyncio.sleep(0.01)
        (result,) = await outputs(sandbox, "print(6 * 7)")
        assert result == (
            "died",
            "[the process had ended, with the one that starts others. The interpreter was ended: "
            "variables and files of earlier calls are gone.]\n",
        )
        assert await outputs(sandbox, "6 * 7") == [("ok", "42\n")]
        assert (await outputs(sandbox, "x"))[0][0] == "error"
        assert await outputs(sandbox, "6 * 7", episode="b") == [("ok", "42\n")]


@asynchronous
async def test_cpu_time_of_interpreters_that_were_lost_counts_for_the_episode():
    async with tool(cpu_s=2.0) as sandbox:
        code = "import os, time\nwhile time.process_time() < 1.5: pass\nos._exit(7)"
        assert (await sandbox.run("a", code)).outcome == "died"
        assert (await sandbox.run("a", code)).outcome == "timeout"  # 0.5 s were left
        result = await sandbox.run("a", "6 * 7")
        assert result.output == "[no CPU time is left for calls of this episode: 2 s]\n"
        await sandbox.end("a")
        assert await outputs(sandbox, "6 * 7") == [("ok", "42\n")]


@asynchronous
async def test_the_files_of_an_episode_are_its_own_and_gone_with_it():
    async with tool() as sandbox:
        write = "import os\nprint(os.listdir('.'), os.getcwd() == os.path.expanduser('~'))\n"
        results = await outputs(sandbox, write + "open('f', 'w').write('x')", "open('f').read()")
        assert results == [("ok", "[] True\n1\n"), ("ok", "'x'\n")]
        assert (await outputs(sandbox, "open('f')", episode="b"))[0][0] == "error"
        await sandbox.end("a")
        assert (await outputs(sandbox, "open('f')"))[0][0] == "error"


@asynchronous
async def test_an_interpreter_that_does_not_start_is_no_result_of_the_code_and_is_not_charged(monkeypatch):
    async with tool() as sandbox:
        directory = sandbox._backend._host._directory
        os.rename(directory, directory + ".away")
        with pytest.raises(ProcessFailure, match="could not be started: FileNotFoundError") as caught:
            await sandbox.run("a", "6 * 7")
        assert caught.value.infrastructure
        os.rename(directory + ".away", directory)
        with monkeypatch.context() as patch:
            patch.setattr(python, "_READY_S", 0.0)
            with pytest.raises(ProcessFailure, match="no result within 0 s") as caught:
                await sandbox.run("a", "6 * 7")
        assert caught.value.infrastructure and sandbox._used_s == {}
        assert await outputs(sandbox, "6 * 7") == [("ok", "42\n")]


# The service


@asynchronous
async def test_passing_failures_of_the_service_are_tried_again(monkeypatch):
    monkeypatch.setattr(service, "_FIRST_PAUSE_S", 0.001)
    async with tool("http") as sandbox:
        sandbox.fusion.answers += [(503, b"busy"), (0, b""), (429, b"")]
        assert await outputs(sandbox, "6 * 7") == [("ok", "42\n")]


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([(503, b"busy")] * 9, "does not answer (HTTP 503: busy)"),
        ([(0, b"")] * 9, "does not answer"),
        ([(422, b"no such field")], "HTTP 422: no such field"),
        ([(200, b"[1]")], "not a JSON object"),
        ([(200, b"{")] * 9, "JSONDecodeError"),
        ([(200, json.dumps({"status": "SandboxError", "message": "no cgroup"}).encode())],
         "failed (no cgroup)"),
        ([(200, json.dumps({"status": "Success", "message": ""}).encode())], "it ran nothing"),
    ],
)  # fmt: skip
@asynchronous
async def test_a_service_that_fails_is_no_result_of_the_code_and_variables_stay(answers, words, monkeypatch):
    monkeypatch.setattr(service, "_FIRST_PAUSE_S", 0.001)
    async with tool("http") as sandbox:
        await sandbox.run("a", "x = 41")
        sandbox.fusion.answers += answers
        used_s = sandbox._used_s["a"]
        with pytest.raises(ProcessFailure, match=re.escape(words)) as caught:
            await sandbox.run("a", "x")
        assert caught.value.infrastructure and not caught.value.lost
        assert sandbox._used_s["a"] == used_s
        sandbox.fusion.answers.clear()
        assert await outputs(sandbox, "x + 1") == [("ok", "42\n")]


def test_a_request_has_the_fields_of_the_api():
    async def run():
        async with tool("http") as sandbox:
            await sandbox.run("a", "x = 'a\\nb'")
            await sandbox.run("a", "print(x)")
            return sandbox.fusion.requests[-1]

    request = asyncio.run(run())
    assert request.keys() == {"code", "language", "compile_timeout", "run_timeout", "memory_limit_MB"}
    assert request["language"] == "python" and request["run_timeout"] >= HANG_S


def test_a_service_that_is_not_there_is_refused_at_the_start(monkeypatch):
    monkeypatch.setattr(service, "_FIRST_PAUSE_S", 0.001)
    settings = SETTINGS.model_copy(update={"url": "http://user:password@127.0.0.1:9"})

    async def run():
        sandbox = PythonSandbox(settings)
        try:
            await sandbox.start()
        finally:
            await sandbox.close()

    with pytest.raises(ProcessFailure, match=r"the sandbox service does not answer \(ConnectError") as caught:
        asyncio.run(run())
    assert "password" not in str(caught.value)


# Parts


def test_kept_output_is_the_first_and_the_last_bytes():
    output = KeptOutput(10)
    for n in range(100):
        output.add(b"%02d" % n)  # 00 01 ... 99
    assert output.bytes() == b"00010\n[... 190 bytes of output cut ...]\n79899"
    short = KeptOutput(10)
    short.add(b"0123456789")
    assert short.bytes() == b"0123456789"


def test_nothing_of_the_interpreter_is_in_the_names_of_the_code():
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.dup2(write, 1)
        os.dup2(write, 2)
        Cells().run("print(sorted(name for name in globals() if not name.startswith('__')), __name__)")
        os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with os.fdopen(read) as output:
        assert output.read() == "[] __main__\n"
