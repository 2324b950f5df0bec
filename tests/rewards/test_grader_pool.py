"""Grader processes: deadlines, memory, order and threads; no process is left behind."""

import math
import os
import re
import resource
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

import grpo_dist
from grpo_dist.rewards.pool import Failure, GraderPool, processes_for
from tests.support.made_completions import boxed
from tests.support.patience import in_time, longer, wait_until
from tests.support.processes import children_of, wait_until_gone
from tests.support.reward_code import code_directory, grader_pool

BOMBS = ["9^{9^{9^9}}", "((100!)!)!", "\\binom{1000000000}{500000000}"]

REWARDS = """
import os, resource, signal, subprocess, sys, time

def length(completion, answer, scale=1.0):
    return scale * len(completion)

def everything(completion, answer, **columns):
    return float(len(columns))

def talks(completion, answer):
    print("noise on standard output", flush=True)
    os.write(1, b'["ok", 13]\\n')
    print("noise on standard error", file=sys.stderr)
    assert sys.stdin.read() == ""
    return 1.0

def begins(mark):
    if mark:
        open(mark, "w").close()

def sleeps(completion, answer, mark=""):
    begins(mark)
    time.sleep(float(completion))
    return 1.0

def burns(completion, answer, mark=""):
    begins(mark)
    return float(9**9**9 % 10)  # in C, never back in Python

def fails(completion, answer):
    raise KeyError(completion)

def leaves(completion, answer):
    sys.exit(3)

def dies(completion, answer):
    os.kill(os.getpid(), signal.SIGSEGV)

def limit(completion, answer):
    return float(resource.getrlimit(resource.RLIMIT_AS)[0])

def hoards(completion, answer):
    return float(len(bytearray(2**34)))

def nothing(completion, answer):
    return None

def infinite(completion, answer):
    return float("inf")

def dies_once(completion, answer):
    if not os.path.exists(completion):
        open(completion, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0

def has_a_child(completion, answer):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(completion, "w").write(str(child.pid))
    time.sleep(600)
"""


code = code_directory(reward_samples=REWARDS)


# For calls that must time out. Others use `patient`, because the machine may be busy.
pool = grader_pool(2, timeout_s=2.0)
patient = grader_pool(2, timeout_s=60.0)


def call(pool: GraderPool, name: str, **keywords: object) -> float | Failure:
    return pool.call(f"reward_samples:{name}", [{"completion": "", "answer": "", **keywords}])[0]


def below(pid: int) -> list[int]:
    """Return all descendants."""
    return [p for child in children_of(pid) for p in (child, *below(child))]


def test_a_bomb_affects_only_its_own_pair(pool: GraderPool) -> None:
    pairs = [(boxed(i), str(i)) for i in range(8)]
    pairs[2:2] = [(boxed(BOMBS[0]), "5")]
    pairs[6:6] = [(boxed(BOMBS[1]), "5")]
    plain = [i for i in range(10) if i not in (2, 6)]
    grades = in_time(pool, lambda: pool.grade(pairs), lambda grades: [grades[i] for i in plain])
    assert [grades[i].outcome for i in plain] == ["correct"] * 8
    assert {grades[i].outcome for i in (2, 6)} <= {"wrong", "timeout"}
    assert [math.isnan(g.reward) for g in grades] == [g.outcome == "timeout" for g in grades]


@pytest.mark.parametrize("bomb", BOMBS)
def test_no_bomb_is_accepted_or_outlives_its_deadline(pool: GraderPool, bomb: str) -> None:
    pairs = [(boxed(bomb), "\\frac{1}{2}"), (boxed("0.5"), "\\frac{1}{2}")]
    first, second = in_time(pool, lambda: pool.grade(pairs), lambda grades: grades[1:])
    assert first.outcome in ("wrong", "timeout", "error")
    assert second.outcome == "correct"


def test_threads_share_the_processes(patient: GraderPool) -> None:
    def work(thread: int) -> list[str]:
        return [g.outcome for g in patient.grade([(boxed(thread), str(i)) for i in range(8)])]

    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(work, range(8)))
    assert results == [["correct" if i == thread else "wrong" for i in range(8)] for thread in range(8)]


def test_a_process_may_have_any_descriptors() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        while stack.enter_context(open(os.devnull)).fileno() < 1024:
            pass
        pool = stack.enter_context(GraderPool(1, timeout_s=60.0))
        assert [grade.outcome for grade in pool.grade([(boxed(5), "5")])] == ["correct"]


@pytest.mark.parametrize(("cpus", "answers", "processes"), [(8, 3, 3), (8, 0, 1), (8, 9, 8), (500, 900, 64)])
def test_a_machine_of_many_cores_has_descriptors_for_its_processes(
    monkeypatch: pytest.MonkeyPatch, cpus: int, answers: int, processes: int
) -> None:
    monkeypatch.setattr("grpo_dist.rewards.pool.available_cpus", lambda: cpus)
    assert processes_for(answers) == processes


def test_malformed_pairs_are_separate_errors(patient: GraderPool) -> None:
    pairs = [(None, "5"), ("\\boxed{5}", 5), "5", (), (b"5", "5"), ("\\boxed{5}", "5")]
    grades = patient.grade(pairs)  # type: ignore[arg-type]
    assert [g.outcome for g in grades] == ["error"] * 5 + ["correct"]
    assert "NoneType" in grades[0].detail
    assert patient.grade([]) == []


def test_any_text_gets_a_grade(patient: GraderPool) -> None:
    texts = [
        "\0\\boxed{5}\0", "\ud800\udfff\\boxed{5}", "🙂\u202e\\boxed{5}", "\n\\boxed{5}\n[]\n",
        "x" * 10_000_000 + "\\boxed{5}",
    ]  # fmt: skip
    assert [g.outcome for g in patient.grade([(text, "5") for text in texts])] == ["correct"] * len(texts)


def test_a_function_receives_only_the_keywords_it_accepts(patient: GraderPool) -> None:
    keywords = [
        {"completion": "abc", "answer": "", "scale": 2.0, "level": 5},
        {"completion": "ab", "answer": ""},
    ]
    assert patient.call("reward_samples:length", keywords) == [6.0, 2.0]
    assert call(patient, "everything", problem="p", level=5) == 2.0


def test_prints_and_reads_of_graded_code_do_not_touch_the_protocol(patient: GraderPool) -> None:
    assert [call(patient, "talks") for _ in range(3)] == [1.0, 1.0, 1.0]


def test_an_answer_is_retried_after_its_process_was_killed(patient: GraderPool, tmp_path: Path) -> None:
    assert call(patient, "dies_once", completion=str(tmp_path / "tried")) == 1.0


def test_functions_fail_one_call_at_a_time(pool: GraderPool) -> None:
    calls = [{"completion": c, "answer": ""} for c in ("0", "6000", "0")]
    results = in_time(pool, lambda: pool.call("reward_samples:sleeps", calls), lambda all_: all_[::2])
    late = results[1]
    assert isinstance(late, Failure) and late.outcome == "timeout" and results[::2] == [1.0, 1.0]


def test_failed_calls_have_a_reason(patient: GraderPool) -> None:
    pool = patient
    failed = call(pool, "fails", completion="k")
    assert isinstance(failed, Failure) and failed.outcome == "error"
    assert re.fullmatch(r"KeyError: 'k' \(.*/reward_samples\.py:\d+ in fails\)", failed.detail)
    exited = call(pool, "leaves")
    assert isinstance(exited, Failure) and exited.outcome == "error"
    assert exited.detail.startswith("SystemExit: 3 (")
    died = call(pool, "dies")
    assert isinstance(died, Failure) and died.outcome == "error" and "died" in died.detail
    assert math.isnan(call(pool, "nothing"))  # type: ignore[arg-type]
    infinite = call(pool, "infinite")
    assert isinstance(infinite, Failure) and "finite" in infinite.detail
    unsendable = call(pool, "length", scale=lambda: 1)
    assert isinstance(unsendable, Failure) and "cannot be sent" in unsendable.detail
    assert call(pool, "length", completion="abcd") == 4.0


def test_a_memory_bomb_is_an_error(patient: GraderPool) -> None:
    result = call(patient, "hoards")
    assert isinstance(result, Failure) and result.outcome == "error" and "memory" in result.detail
    assert [g.outcome for g in patient.grade([(boxed(5), "5")] * 4)] == ["correct"] * 4


def test_a_failed_import_restores_the_memory_limit(code: str) -> None:
    with GraderPool(1, timeout_s=60.0, memory_mb=512, code_paths=[code]) as pool:
        limit = call(pool, "limit")
        with pytest.raises(ValueError, match="no function"):
            pool.check("reward_samples:absent")
        assert call(pool, "limit") == pytest.approx(limit, rel=0.5)


@pytest.mark.slow
def test_importing_does_not_count_against_the_deadline(code: str) -> None:
    Path(code, "slow_import.py").write_text("import time\ntime.sleep(1.5)\ndef one(completion): return 1.0\n")
    with GraderPool(1, timeout_s=0.5, code_paths=[code]) as pool:
        results = in_time(pool, lambda: pool.call("slow_import:one", [{"completion": ""}]), list)
        assert results == [1.0]


def test_importing_math_verify_counts_against_no_answer(code: str) -> None:
    """Only answers that the package's parser cannot read need it: here the first answer of a process."""
    Path(code, "sitecustomize.py").write_text(  # read by a grader process when it starts
        "import sys, time\n"
        "class Slow:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'math_verify': time.sleep(2.5)\n"
        "sys.meta_path.insert(0, Slow())\n"
    )
    with GraderPool(1, timeout_s=2.0, memory_mb=64, code_paths=[code]) as pool:
        assert [grade.outcome for grade in pool.grade([("x7@@ 3 ^^", "579")])] == ["wrong"]


def test_a_process_that_does_not_start_in_time_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_dist.rewards.pool._START_S", 0.01)
    with GraderPool(1) as pool:
        (grade,) = pool.grade([("\\boxed{2}", "2")])
    assert grade.outcome == "error" and "not started within 0.01 s" in grade.detail


def test_a_grader_that_the_machine_does_not_run_misses_no_deadline() -> None:
    """It has used no CPU. One that computes for too long has: the bombs above."""
    with GraderPool(1, timeout_s=0.5) as pool:
        assert pool.grade([("\\boxed{2}", "2")])[0].outcome == "correct"  # the process is there
        (grader,) = psutil.Process(pool._idle.queue[0]._child.pid).children()
        grader.suspend()
        resumed = threading.Timer(1.5, grader.resume)
        resumed.start()
        assert pool.grade([("\\boxed{3}", "2")])[0].outcome == "wrong"
        resumed.join()


def module_in(directory: Path, name: str, value: float) -> None:
    directory.mkdir(exist_ok=True)
    (directory / f"{name}.py").write_text(f"def value(completion): return {value}\n")


@pytest.mark.slow
def test_custom_code_is_found_in_code_paths_then_on_the_usual_path_but_never_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, usual, here = (tmp_path / name for name in ("named", "usual", "here"))
    for directory, value in ((named, 1.0), (usual, 2.0), (here, 3.0)):
        module_in(directory, "in_all", value)
    for directory, name in ((usual, "in_two"), (here, "in_two"), (here, "only_here")):
        module_in(directory, name, 2.0 if directory == usual else 3.0)
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTHONPATH", f"{os.pathsep}{usual}{os.pathsep}")  # empty entries do not count
    with GraderPool(1, code_paths=[str(named)]) as pool:
        values = [pool.call(f"{name}:value", [{"completion": ""}]) for name in ("in_all", "in_two")]
        assert values == [[1.0], [2.0]]
        with pytest.raises(ValueError, match="No module named 'only_here'"):
            pool.check("only_here:value")
    with GraderPool(1, code_paths=["."]) as pool:
        assert pool.call("only_here:value", [{"completion": ""}]) == [3.0]


@pytest.mark.slow
def test_a_grader_process_imports_its_parents_package_but_no_neighbouring_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package's directory is not searched for custom code, and cannot be shadowed by it."""
    other = tmp_path / "grpo_dist"
    other.mkdir()
    (other / "__init__.py").write_text("raise ImportError('another one')\n")
    (tmp_path / "mine.py").write_text(
        "import sys, grpo_dist\n"
        "def own(completion): return float(grpo_dist.__file__ == completion)\n"
        "def beside(completion): return float(completion in sys.path)\n"
    )
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr("grpo_dist.runtime.processes._ROOT", beside := tmp_path / "beside")
    beside.mkdir()
    (beside / "grpo_dist").symlink_to(Path(grpo_dist.__file__).parent)
    with GraderPool(1, code_paths=[str(tmp_path)]) as pool:
        assert pool.call("mine:own", [{"completion": str(beside / "grpo_dist/__init__.py")}]) == [1.0]
        assert pool.call("mine:beside", [{"completion": str(beside)}]) == [0.0]
        assert pool.grade([(boxed(5), "5")])[0].outcome == "correct"


def test_a_timeout_also_ends_child_processes(
    pool: GraderPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "pid"
    note.touch()
    for timeout_s in longer(2.0):
        monkeypatch.setattr(pool, "_timeout_s", timeout_s)
        late = call(pool, "has_a_child", completion=str(note))
        assert late == Failure("timeout", f"no result within {timeout_s:g} s")
        if child := note.read_text():
            break
    assert wait_until_gone([int(child)]) == []


@pytest.mark.slow
def test_no_process_is_signalled_twice(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a kill and a wait, the process id may belong to another process."""
    killed = []
    kill = os.killpg
    monkeypatch.setattr(os, "killpg", lambda group, number: (killed.append(group), kill(group, number)))
    with GraderPool(1, timeout_s=2.0, code_paths=[code]) as pool:
        assert isinstance(call(pool, "sleeps", completion="600"), Failure)
        assert len(killed) == 1
        assert in_time(pool, lambda: [call(pool, "length", completion="abc")], list) == [3.0]
        before = len(killed)
        assert isinstance(call(pool, "sleeps", completion="600"), Failure)
    assert len(killed) == len(set(killed)) == before + 1


def test_a_killed_process_that_does_not_exit_is_replaced(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with GraderPool(1, timeout_s=2.0, code_paths=[code]) as pool:
        monkeypatch.setattr(subprocess.Popen, "poll", lambda self: None)  # not seen to have ended
        assert isinstance(call(pool, "sleeps", completion="600"), Failure)
        assert in_time(pool, lambda: [call(pool, "length", completion="abc")], list) == [3.0]


@pytest.mark.slow
def test_closing_ends_every_process() -> None:
    before = set(children_of(os.getpid()))
    pool = GraderPool(2)
    pool.grade([(boxed(5), "5")] * 4)
    started = [pid for pid in children_of(os.getpid()) if pid not in before]
    assert len(started) == 2
    started += [pid for guardian in started for pid in below(guardian)]
    assert len(started) == 4
    pool.close()
    pool.close()
    assert wait_until_gone(started) == []


@pytest.mark.parametrize("function", ["burns", "sleeps"])
def test_no_process_outlives_a_killed_parent(code: str, function: str, tmp_path: Path) -> None:
    mark = tmp_path / "begun"
    keywords = {"completion": "600", "answer": "", "mark": str(mark)}
    script = (
        "from grpo_dist.rewards.pool import GraderPool\n"
        f"pool = GraderPool(2, timeout_s=600, code_paths=[{code!r}])\n"
        "pool.grade([('5', '5')] * 4)\n"
        "print('ready', flush=True)\n"
        f"pool.call('reward_samples:{function}', [{keywords!r}])\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        try:
            assert parent.stdout is not None and parent.stdout.readline() == b"ready\n"
            wait_until(mark.exists, "the function was not called")
            # Two graders, which are idle, and one for the user's code, each below a guardian.
            wait_until(
                lambda: [len(below(guardian)) for guardian in children_of(parent.pid)] == [1, 1, 1],
                lambda: f"the pool has other processes: {below(parent.pid)}",
            )
            graders = below(parent.pid)
        finally:
            parent.kill()
    assert wait_until_gone(graders) == []


@pytest.mark.parametrize(
    "arguments",
    [{"num_workers": 0}, {"num_workers": 1, "timeout_s": 0.0}, {"num_workers": 1, "memory_mb": -1}],
)
def test_invalid_pool_arguments_are_rejected(arguments: dict) -> None:
    with pytest.raises(ValueError, match="positive"):
        GraderPool(**arguments)


def test_order_is_kept(patient: GraderPool) -> None:
    answers = [i % 3 == 0 for i in range(60)]
    grades = patient.grade([(boxed(i if right else i + 1), str(i)) for i, right in enumerate(answers)])
    assert [g.reward for g in grades] == [float(right) for right in answers]


def test_processes_are_replaced_after_enough_work(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr("grpo_dist.rewards.pool._TASKS_PER_PROCESS", 2)
    Path(code, "who.py").write_text("import os\ndef am_i(completion): return float(os.getpid())\n")
    with GraderPool(1, code_paths=[code]) as pool:
        pids = pool.call("who:am_i", [{"completion": ""}] * 5)
    assert pids[0] == pids[1] != pids[2] == pids[3] != pids[4]
