"""The code reward: the data's tests on the real sandbox, and solutions that pass without solving."""

import asyncio
import math
import random

import numpy as np
import pytest

from grpo_dist.environments.sandbox.host import ProcessFailure
from grpo_dist.environments.sandbox.python import CodeResult, PythonSandbox
from grpo_dist.rewards import unit_tests
from grpo_dist.rewards.scorer import Scorer
from grpo_dist.rewards.unit_tests import last_block, read_tests
from tests.support.made_completions import check_reward, completion_group, scored, spec
from tests.support.patience import HANG_S, cpu_s, longer
from tests.support.services import sandbox_fusion

pytestmark = pytest.mark.machine
LIMITS = {"call_s": HANG_S, "episode_s": HANG_S, "cpu_s": 30.0}


def block(code):
    return f"Here it is:\n```python\n{code}\n```\nDone."


def run(pool, completions, tests, setup="K = 2", **kwargs):
    group = completion_group(completions, "", columns={"tests": tests, "setup": setup})
    return scored(pool, group, spec("code", "unit_tests", kwargs={"sandbox": LIMITS} | kwargs))


def test_a_solution_is_right_if_it_passes_all_tests(pool):
    tests = ["assert double(2) == 4", "assert double(-1) == -2\nassert double(0) == 0"]
    completions = [
        block("def double(x):\n    return K * x"), block("def double(x):\n    return 4"),
        block("def double(x)\n    return 4"), "def double(x): return 2 * x",
        block("x = 1") + block("def double(x): return x + x"),
        block("import sys\ndef double(x): sys.exit(0)"), block("import os\ndef double(x): os._exit(0)"),
        block("raise SystemExit"), "", "<think>" + block("def double(x): return 2 * x"),
    ]  # fmt: skip
    scores, scorer = run(pool, completions, tests, setup_column="setup")
    assert scores.rewards.tolist() == [1, 0, 0, 0, 1, 0, 0, 0, 0, 0]
    assert scorer.failures == {}
    share, _ = run(pool, completions[:3], tests, setup_column="setup", reward="share")
    assert share.rewards.tolist() == [1, 0.5, 0]


def test_a_program_is_right_if_it_prints_the_output(pool):
    tests = [{"input": "2 3\n", "output": "5\n"}, {"input": "1 1", "output": "2  \n\n"}]
    completions = [
        block("a, b = map(int, input().split())\nprint(a + b)"),
        block(
            "import sys\nif __name__ == '__main__':\n    read = sys.stdin.buffer.read().split()\n"
            "    print(sum(map(int, read)))"
        ),
        block("print(5)"),
        block("a, b = map(int, input().split())\na + b"),
        block("print(5); raise ValueError"),
        block("print(sum(map(int, sys.stdin.read().split())))"),  # without its import
        block("from __future__ import annotations\nprint(sum(map(int, input().split())))"),
    ]
    scores, _ = run(pool, completions, tests)
    assert scores.rewards.tolist() == [1, 1, 0, 0, 0, 0, 1]


FUNCTIONAL = {"testtype": "functional", "metadata": {"func_name": "scaled"}}


@pytest.mark.slow
def test_a_function_is_right_if_it_returns_the_output(pool):
    """A test of LiveCodeBench; solutions may leave out the imports that LeetCode has."""
    tests = [
        {"input": "[1, 2]\n3", "output": "[3, 6]"} | FUNCTIONAL,
        {"input": '[]\n"a\\nb"', "output": "[]"} | FUNCTIONAL,
    ]
    body = "def scaled({}values: List[int], factor):\n{}    print(factor)\n{}    return {}"
    method = body.format("self, ", "    ", "    ", "tuple(value * factor for value in values)")
    completions = [
        block("class Solution:\n    " + method),
        block(body.format("", "", "", "[*map(partial(mul, factor), values)]")),
        block(body.format("", "", "", "[3, 6]")),
        block(body.format("", "", "", "exit(0)")),
        block("print([3, 6])"),
    ]
    scores, scorer = run(pool, completions, tests, setup_column="setup")
    assert scores.rewards.tolist() == [1, 1, 0, 0, 0] and scorer.failures == {}


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("0.5", "0.50", True), ("1e2  -0\n7 ", "100 0.0\n07", True), ("a b", "a b ", True),
        ("0.5", "0.51", False), ("1 2", "1 2 0", False), ("1\n2", "1 2", False), ("a  b", "a b", False),
        ("nan", "NaN", False), ("snan", "1", False), ("0.30000000000000004", "0.3", False),
    ],
)  # fmt: skip
def test_lines_of_numbers_are_compared_by_value(printed, expected, same):
    assert unit_tests._same_output(CodeResult(printed, "ok", 0.0), expected) is same


@pytest.mark.slow
def test_the_code_of_the_data_runs_in_front_and_by_itself(pool):
    """A solution may begin with an import from __future__; what the setup prints does not count as its
    output; if the setup fails, the solution is not scored.
    """
    right = "from __future__ import annotations\nprint(K * int(input()))"
    completions, tests = [block(right), block("print(5)")], [{"input": "2", "output": "4"}]

    def rewards(setup):
        scores, scorer = run(pool, completions, tests, setup, setup_column="setup")
        return scores.rewards, [*scorer.failures.get("code", ())]

    assert rewards("print('ready')\nK = 2")[0].tolist() == [1, 0]
    unscored, (reason,) = rewards("K = missing")
    assert np.isnan(unscored).all()
    assert reason.startswith("column setup: error ") and "NameError: name 'missing' is not defined" in reason


READERS = {
    "input": "data = input()",
    "sys.stdin": "import sys\ndata = sys.stdin.readline().strip()",
    "open(0)": "data = open(0).read().strip()",
    "os.read": "import os\ndata = os.read(0, 1000).decode().strip()",
    "fileinput": "import fileinput\ndata = next(iter(fileinput.input(files=('-',)))).strip()",
    "/dev/stdin": "data = open('/dev/stdin').read().strip()",
    "a child": "import subprocess as s\ndata = s.run(['cat'], capture_output=True).stdout.decode().strip()",
}


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_a_program_finds_its_input_however_it_reads(pool, reader):
    solution = block(READERS[reader] + "\nimport sys\nprint('a trace', file=sys.stderr)\nprint(data[::-1])")
    scores, scorer = run(pool, [solution], [{"input": "héllo\n", "output": "olléh\n"}])
    assert scores.rewards.tolist() == [1], scorer.failures


# Programs that write their output as they end, or through a stream that is not the interpreter's.
ENDINGS = {
    "a thread that nobody joins": """import sys, threading, time
sys.setrecursionlimit(10**6)
threading.stack_size(2**27)
def depth(n): return n and 1 + depth(n - 1)
def main():
    time.sleep(0.05)
    print(sum(map(int, input().split())) + depth(50_000) - 50_000)
threading.Thread(target=main).start()""",
    "at exit": """import atexit, io, sys
sys.stdout = io.StringIO()
@atexit.register
def write(): sys.__stdout__.write(sys.stdout.getvalue())
print(sum(map(int, input().split())))""",
    "a file left open": "out = open(1, 'w', closefd=False)\nout.write(str(sum(map(int, input().split()))))",
    "at once": """import os, sys
print(sum(map(int, os.read(0, 100).split())))
sys.stdout.flush()
os._exit(0)""",
    "a stream of its own": """import io, os, sys
class Fast(io.IOBase):
    def __init__(self, file):
        self.fd, self.writable, self.buffer = file.fileno(), 'r' not in file.mode, io.BytesIO()
    def readline(self): return os.read(self.fd, os.fstat(self.fd).st_size).decode()
    def write(self, text): return self.buffer.write(text.encode())
    def flush(self):
        if self.writable:
            os.write(self.fd, self.buffer.getvalue())
            self.buffer = io.BytesIO()
sys.stdin, sys.stdout = Fast(sys.stdin), Fast(sys.stdout)
print(sum(map(int, sys.stdin.readline().split())))""",
    "a buffer": "import sys\nread = sys.stdin.buffer.read\n"
    "sys.stdout.buffer.write(b'%d' % sum(map(int, read().split())))\nexit()",
    "its own name": "import sys, __main__\n"
    "assert __main__.__file__ == sys.argv[-1] and __name__ == '__main__'\n"
    "print(sum(map(int, input().split())))",
}
WRONG_ENDINGS = {
    "a thread that is wrong": "import threading\nthreading.Thread(target=print, args=(8,)).start()",
    "a status": "import os, sys\nprint(7)\nsys.stdout.flush()\nos._exit(1)",
    "a text as status": "print(7)\nraise SystemExit('7')",
    "a signal": "import os, sys\nprint(7)\nsys.stdout.flush()\nos.kill(os.getpid(), 9)",
}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["process", "http"])
def test_a_program_ends_as_it_does_outside(pool, backend):
    programs = ENDINGS | WRONG_ENDINGS
    with sandbox_fusion() as fusion:
        sandbox = LIMITS | ({"url": fusion.url} if backend == "http" else {})
        tests = [{"input": "3 4\n", "output": "7\n"}]
        scores, scorer = run(pool, [*map(block, programs.values())], tests, sandbox=sandbox)
    expected = dict.fromkeys(ENDINGS, 1) | dict.fromkeys(WRONG_ENDINGS, 0)
    assert dict(zip(programs, scores.rewards.tolist(), strict=True)) == expected
    assert scorer.failures == {}


@pytest.mark.slow
def test_a_program_whose_thread_never_ends_is_wrong(pool):
    endless = block(
        "import threading, time\nprint(7)\nthreading.Thread(target=time.sleep, args=(1e6,)).start()"
    )
    right = block("print(7)")
    for call_s in longer(4.0):
        tests = [{"input": "", "output": "7"}]
        scores, _ = run(pool, [endless, right], tests, sandbox=LIMITS | {"call_s": call_s})
        if scores.rewards[1]:
            break
    assert scores.rewards.tolist() == [0, 1]


@pytest.mark.slow
def test_random_numbers_of_a_program_are_the_same_in_each_run(pool):
    code = "import random\nprint(random.getrandbits(64), hash('a'))"
    tests = [{"input": "", "output": str(random.Random(0).getrandbits(64))}]
    completions = [block(code.replace(", hash('a')", "")), block(code)]
    assert run(pool, completions, tests)[0].rewards.tolist() == [1, 0]


@pytest.mark.slow
def test_where_no_program_can_be_started_nothing_is_known(pool, monkeypatch):
    """The check before the run reports it, too."""
    plain = unit_tests._RUN
    monkeypatch.setattr(unit_tests, "_RUN", plain.replace("sys.executable", "'/missing/python'"))
    scores, scorer = run(pool, [block("print(1)")], [{"input": "", "output": "1"}])
    assert np.isnan(scores.rewards).all()
    (reason,) = scorer.failures["code"]
    assert reason.startswith("the sandbox failed: no program can be started: ")
    assert "/missing/python" in reason
    with pytest.raises(ValueError, match=r"no code can be run here .*no program can be started"):
        check_reward("unit_tests", sandbox=LIMITS)


LOGS = "import sys, os\nprint('a trace', file=sys.stderr)\nos.write(2, b'another')\n"
FUTURE = "from __future__ import annotations"
LOGGERS = {
    "plain": LOGS,
    "future": f"{FUTURE}\n{LOGS}",
    "documented": f'"""What it does."""\n{FUTURE}  # é\nfrom __future__ import (\n    division,\n)\n{LOGS}',
    "one line": f"{FUTURE}; s = '''é\n'''\n{LOGS}",
    "carriage returns": f"# é\r\n{FUTURE}\r\n{LOGS}",
    "in a text": f"{LOGS}s = 'from __future__ import x'\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["process", "http"])
def test_what_a_program_logs_is_no_output(pool, backend):
    """On the service, each piece of code has both streams opened again."""
    solutions = [block(f"{code}print(input()[::-1])") for code in LOGGERS.values()]
    wrong = block(f"{LOGS}print(input())")
    with sandbox_fusion() as fusion:
        sandbox = LIMITS | ({"url": fusion.url} if backend == "http" else {})
        tests = [{"input": "abc\n", "output": "cba\n"}]
        scores, scorer = run(pool, [*solutions, wrong], tests, sandbox=sandbox)
    assert dict(zip(LOGGERS, scores.rewards.tolist()[:-1], strict=True)) == dict.fromkeys(LOGGERS, 1)
    assert scores.rewards[-1] == 0 and scorer.failures == {}


@pytest.mark.slow
def test_long_inputs_and_outputs_are_compared_whole_or_not_at_all(pool):
    """A million bytes in and out. Programs that print too much are wrong; tests that expect more than the
    limit are not scored.
    """
    lines = "\n".join(map(str, range(150_000)))
    right = block("import sys\nprint(sys.stdin.read(), end='')")
    wrong = block("import sys\nprint(sys.stdin.read().replace('74999', '7499x'), end='')")
    endless = block("for i in range(10**6): print(i)")
    tests = [{"input": lines, "output": lines}]
    assert len(lines) > 10 * 65_536
    assert run(pool, [right, wrong, endless], tests)[0].rewards.tolist() == [1, 0, 0]
    scores, scorer = run(pool, [right], tests, output_kb=512)
    assert np.isnan(scores.rewards).all()
    (reason,) = scorer.failures["code"]
    assert "a test expects 917 KiB of output, but kwargs.output_kb = 512" in reason


@pytest.mark.slow
def test_a_program_whose_input_cannot_be_given_is_not_taken_for_wrong(pool):
    right = block("import sys\nprint(len(sys.stdin.read()))")
    tests = [{"input": "x" * (2**20 + 1), "output": str(2**20 + 1)}]
    scores, scorer = run(pool, [right], tests, sandbox=LIMITS | {"files_mb": 1})
    assert np.isnan(scores.rewards).all()
    (reason,) = scorer.failures["code"]
    assert "a test has 2 MiB of input, but a file may have kwargs.sandbox.files_mb = 1; raise it" in reason


@pytest.mark.slow
@pytest.mark.parametrize("outcome", ["error", "memory", "timeout", "died"])
def test_where_the_sandbox_cannot_hold_the_input_nothing_is_known(pool, monkeypatch, outcome):
    scorer = Scorer([spec("code", "unit_tests", kwargs={"sandbox": LIMITS})], pool)

    async def full(self, episode, code):
        await asyncio.sleep(0)
        return CodeResult("OSError: no space left\n", outcome, 0.0)

    monkeypatch.setattr("grpo_dist.environments.sandbox.python.PythonSandbox.run", full)
    tests = [{"input": "1", "output": "1"}]
    result = scorer.score(completion_group([block("print(input())")], "", columns={"tests": tests}))
    scorer.close()
    assert np.isnan(result.rewards).all()
    reason = f"the sandbox failed: the input cannot be written: {outcome} OSError: no space left"
    assert scorer.failures == {"code": {reason: 1}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong", "test"),
    [
        ("def double(x): return 2 * x", "def double(x): return 5", "assert double(2) == 4"),
        ("print(2 * int(input()))", "print(5)", {"input": "2", "output": "4"}),
    ],
)
def test_an_interpreter_that_the_machine_loses_between_two_calls_is_no_wrong_solution(
    pool, monkeypatch, right, wrong, test
):
    """The process that starts interpreters is killed after the first call of the first solution."""
    plain, killed = PythonSandbox.run, []

    async def run(self, episode, code):
        result = await plain(self, episode, code)
        if not killed:
            host = self._backend._host
            killed.append(host._child)
            host._child.kill()
            while host._child is killed[0]:
                await asyncio.sleep(0.01)
        return result

    scorer = Scorer([spec("code", "unit_tests", kwargs={"sandbox": LIMITS, "max_concurrency": 1})], pool)
    monkeypatch.setattr(PythonSandbox, "run", run)
    group = completion_group([block(right), block(wrong)], "", columns={"tests": [test]})
    rewards = scorer.score(group).rewards
    scorer.close()
    np.testing.assert_array_equal(rewards, [np.nan, 0.0])
    reason = "the sandbox failed: it lost an interpreter between two calls"
    assert scorer.failures == {"code": {reason: 1}}


def test_code_that_never_ends_is_wrong_and_a_sandbox_that_fails_is_not(pool, monkeypatch):
    endless = [block("while True: pass"), block("def f(): return 1")]
    for call_s in longer(4.0):
        scores, _ = run(pool, endless, ["assert f() == 1"], sandbox=LIMITS | {"call_s": call_s})
        if scores.rewards[1]:
            break
    assert scores.rewards.tolist() == [0, 1]
    scorer = Scorer([spec("code", "unit_tests", kwargs={"sandbox": LIMITS})], pool)

    async def fails(self, episode, code):
        await asyncio.sleep(0)
        raise ProcessFailure("error", "no space left", infrastructure=True)

    monkeypatch.setattr("grpo_dist.environments.sandbox.python.PythonSandbox.run", fails)
    result = scorer.score(completion_group([endless[1], "no code"], "", columns={"tests": ["f()"]}))
    scorer.close()
    np.testing.assert_array_equal(result.rewards, [math.nan, 0.0])
    assert scorer.failures == {"code": {"the sandbox failed: no space left": 1}}


def test_tests_are_a_list_or_its_json():
    assert read_tests('["assert f()", "assert g()"]', "t") == ["assert f()", "assert g()"]
    assert read_tests("def check(f): pass\ncheck(f)", "t") == ["def check(f): pass\ncheck(f)"]
    pair = {"input": "", "output": ""}
    for kind in (
        {},
        {"testtype": "stdin", "metadata": {"func_name": None}},
        {"type": "stdin_stdout"},
        {"type": "public"},
    ):
        assert read_tests([pair | kind], "t") == [pair]
    call = {"input": "1", "output": "2"}
    assert read_tests([call | FUNCTIONAL], "t") == [call | {"function": "scaled"}]
    for wrong in (None, "", [], [1], [{"input": "1"}], "3", {"input": "", "output": ""}):
        with pytest.raises(ValueError, match="column t has no tests"):
            read_tests(wrong, "t")


@pytest.mark.parametrize(
    "test",
    [
        {"testtype": "functional", "metadata": {}}, {"type": "function_call", "fn_name": "f"},
        {"testtype": "stdin", "metadata": {"func_name": "f"}}, FUNCTIONAL | {"input": "[1,"},
        FUNCTIONAL | {"output": "two"}, FUNCTIONAL | {"output": "[" * 100_000},
    ],
)  # fmt: skip
def test_tests_that_cannot_be_run_are_refused(test):
    words = r"column t: a test has testtype .*; expected `stdin` without a function, or `functional` with one"
    with pytest.raises(ValueError, match=words):
        read_tests(["assert f()", {"input": "1", "output": "2"} | test], "t")


@pytest.mark.slow
def test_rows_without_tests_are_not_scored_and_the_sandbox_is_tried_before_the_run(pool):
    scores, scorer = run(pool, [block("x = 1")], None)
    (reason,) = scorer.failures["code"]
    assert np.isnan(scores.rewards).all() and "column tests has no tests" in reason
    check_reward("unit_tests", sandbox=LIMITS)
    with pytest.raises(ValueError, match=r"unit_tests: kwargs\.sandbox: no code can be run here"):
        check_reward("unit_tests", sandbox={"url": "http://127.0.0.1:9"})


def test_the_last_block_of_python_counts():
    assert last_block("```python\na\n```\n```\nb\n```\n```text\nc\n```") == "b\n"
    assert last_block("```Python3 title\na\n```") == "a\n"
    assert last_block("```python\nnever closed") is None
    assert last_block("```python\n    return x\n```") == "    return x\n"  # the body of a header


def test_a_block_in_an_item_of_a_list_loses_the_indentation_of_its_fence():
    code = "def f(x):\n\n    return x\n"
    item = "1. So:\n   ```py\n   def f(x):\n\n       return x\n   ```"
    assert last_block(item) == code
    assert last_block(item.replace("   ", "\t")) == "def f(x):\n\n\t return x\n"
    assert last_block(f"    ```py\n{code}    ```") == code  # only the fence is indented
    assert last_block("  ```\n      return x\n  ```") == "    return x\n"


def test_blocks_are_found_in_time_that_grows_with_the_text():
    with cpu_s(1.0):
        assert last_block("```" + "a" * 100_000) is None
        assert last_block("```" + " " * 100_000) is None
