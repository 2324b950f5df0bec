"""Rewards that attack their processes forge no score, shift no answer and leave no process behind."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from grpo_dist.rewards.pool import Failure, GraderPool
from tests.support.made_completions import boxed
from tests.support.processes import alive, children_of, wait_until_gone
from tests.support.reward_code import code_directory, grader_pool

HOSTILE = """
import gc, json, os, signal, subprocess, sys, threading, time

def length(completion):
    return float(len(completion))

def pipes():
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if "pipe:" in os.readlink(f"/proc/self/fd/{name}"):
                found.append(int(name))
        except OSError:
            pass
    return found

def write_everywhere(line):
    for fd in pipes():
        try:
            os.set_blocking(fd, False)
            os.write(fd, line)
        except OSError:
            pass
        try:
            os.set_blocking(fd, True)
        except OSError:
            pass

def forges(completion):
    write_everywhere(b'["ok", 1000.0]\\n')
    return 0.0

def forges_often(completion):
    write_everywhere(b'["ok", 1000.0]\\n' * 20)
    return 0.0

def half_a_line(completion):
    write_everywhere(b'["ok", ')
    return 0.0

def floods(completion):
    for _ in range(400):
        write_everywhere(b"x" * 60000)
    return 0.0

def number_of_request():
    frame = sys._getframe()
    while frame is not None:
        for value in frame.f_locals.values():
            if isinstance(value, str) and len(value) == 32 and set(value) <= set("0123456789abcdef"):
                return value
        frame = frame.f_back
    return "none"

def replies_twice(completion):
    write_everywhere((json.dumps([number_of_request(), "ok", 1000.0]) + "\\n").encode())
    return 0.0

def forges_later(completion):
    def later():
        for _ in range(200):
            write_everywhere(b'["ok", 1000.0]\\n')
            time.sleep(0.005)
    threading.Thread(target=later, daemon=True).start()
    return 0.0

def in_a_fork(completion):
    if os.fork() == 0:
        time.sleep(0.2)
        return 1000.0
    return 0.0

def a_fork_has_no_pipe(completion):
    before = len(pipes())
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, str(len(pipes())).encode())
        os._exit(0)
    inside = int(os.read(read, 10))
    os.wait()
    os.close(read)
    os.close(write)
    return float(before > 0 and inside == 2)  # the pipe made here

def patches_the_grader(completion):
    import grpo_dist.rewards.child as child
    import grpo_dist.rewards.math as math
    math.grade = child._grade = lambda *_, **__: math.Grade.from_outcome("correct")
    child._KINDS["grade"] = lambda *_: ["correct", ""]
    return 0.0

ESCAPE = "import os, sys, time; open(sys.argv[1], 'a').write(f'{os.getpid()}\\\\n'); time.sleep(600)"

def leaves_a_session(completion):
    subprocess.Popen([sys.executable, "-c", ESCAPE, completion], start_new_session=True)
    wait_for(completion, 1)
    return 1.0

def leaves_a_double_fork(completion):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            with open(completion, "a") as file:
                file.write(f"{os.getpid()}\\n")
            time.sleep(600)
        os._exit(0)
    wait_for(completion, 1)
    return 1.0

def leaves_and_sleeps(completion):
    leaves_a_session(completion)
    leaves_a_double_fork(completion)
    time.sleep(600)

def leaves_and_dies(completion):
    leaves_a_session(completion)
    os.kill(os.getpid(), signal.SIGSEGV)

def leaves_and_kills_its_guardian(completion):
    leaves_a_session(completion)
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)

def wait_for(path, lines):
    while not os.path.exists(path) or len(open(path).read().split()) < lines:
        time.sleep(0.01)
"""


code = code_directory(hostile=HOSTILE)


pool = grader_pool(1, timeout_s=60.0)


def call(pool: GraderPool, name: str, *completions: str) -> list[float | Failure]:
    return pool.call(f"hostile:{name}", [{"completion": c} for c in completions])


@pytest.mark.parametrize(
    "attack",
    ["forges", "forges_often", "half_a_line", "floods", "replies_twice", "forges_later", "in_a_fork"],
)
def test_a_reward_that_writes_to_every_descriptor_neither_forges_nor_shifts_scores(
    pool: GraderPool, attack: str
) -> None:
    texts = ["x" * n for n in range(1, 30)]
    for _ in range(2):
        score = call(pool, attack, "")[0]
        # A reward can find the number of its own request in a frame, so it may forge its own score.
        assert score == 0.0 or isinstance(score, Failure) or attack == "replies_twice"
        grades = pool.grade([(boxed(i % 2), "1") for i in range(10)])
        assert [grade.reward for grade in grades] == [float(i % 2) for i in range(10)]
        assert call(pool, "length", *texts) == [float(len(text)) for text in texts]


def test_a_forged_reply_is_an_error_that_names_the_cause(pool: GraderPool) -> None:
    result = call(pool, "forges", "")[0]
    assert isinstance(result, Failure) and "other code, such as a reward function" in result.detail


def test_a_process_that_a_reward_forks_has_no_pipe_of_the_grader(pool: GraderPool) -> None:
    assert call(pool, "a_fork_has_no_pipe", "") == [1.0]


def test_user_code_cannot_change_grades(pool: GraderPool) -> None:
    assert call(pool, "patches_the_grader", "") == [0.0]
    assert pool.grade([(boxed(4), "5")])[0].outcome == "wrong"


def escaped(note: Path) -> list[int]:
    return [int(pid) for pid in note.read_text().split()]


@pytest.mark.parametrize("leaves", ["leaves_a_session", "leaves_a_double_fork"])
def test_closing_ends_processes_that_left_the_session(code: str, tmp_path: Path, leaves: str) -> None:
    note = tmp_path / "pids"
    with GraderPool(1, timeout_s=60.0, code_paths=[code]) as pool:
        assert call(pool, leaves, str(note)) == [1.0]
        assert all(map(alive, escaped(note)))
    assert wait_until_gone(escaped(note)) == []


@pytest.mark.parametrize("leaves", ["leaves_and_sleeps", "leaves_and_dies", "leaves_and_kills_its_guardian"])
def test_a_lost_process_ends_with_all_that_it_started(code: str, tmp_path: Path, leaves: str) -> None:
    note = tmp_path / "pids"
    with GraderPool(1, timeout_s=4.0, code_paths=[code]) as pool:
        assert isinstance(call(pool, leaves, str(note))[0], Failure)
        assert escaped(note) != [] and wait_until_gone(escaped(note)) == []


@pytest.mark.slow
@pytest.mark.parametrize("guardians", ["run", "are stopped"])
def test_processes_that_left_the_session_end_with_a_killed_parent(
    code: str, tmp_path: Path, guardians: str
) -> None:
    note = tmp_path / "pids"
    script = (
        "import time\n"
        "from grpo_dist.rewards.pool import GraderPool\n"
        f"pool = GraderPool(1, timeout_s=600, code_paths=[{code!r}])\n"
        f"pool.call('hostile:leaves_a_double_fork', [{{'completion': {str(note)!r}}}])\n"
        f"pool.call('hostile:leaves_a_session', [{{'completion': {str(note)!r}}}])\n"
        # A guardian that is stopped while it still imports does not wake up: all have started here.
        "pool.grade([('1', '1')])\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        try:
            assert parent.stdout is not None and parent.stdout.readline() == b"ready\n"
            children = children_of(parent.pid)
            for guardian in children if guardians == "are stopped" else []:
                os.kill(guardian, signal.SIGSTOP)
        finally:
            parent.kill()
    assert len(escaped(note)) >= 1 and wait_until_gone([*children, *escaped(note)]) == []


@pytest.mark.slow
def test_killed_graders_leave_no_zombies(code: str) -> None:
    before = _zombies()
    with GraderPool(1, timeout_s=0.5, code_paths=[code]) as pool:
        for _ in range(2):
            assert isinstance(pool.grade([(boxed("9^{9^{9^9}}"), "5")])[0].detail, str)
    assert _zombies() <= before


def _zombies() -> set[Path]:
    """Return zombies of this process; other tests may have left some."""
    zombies = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):  # it has ended
            state, parent, *_ = path.read_text().rpartition(")")[2].split()
            if state == "Z" and int(parent) == os.getpid():
                zombies.add(path)
    return zombies


# A pool's process that ends as soon as its guardian is stopped, right after the guardian forked the grader.
STOPPED_AT_ONCE = """
import os, signal, time
from grpo_dist.runtime.processes import fork_guarded
lifeline, held = os.pipe()
guardian = os.fork()
if not guardian:
    os.close(held)
    fork = os.fork
    def stopped():
        child = fork()
        if child:
            os.kill(os.getpid(), signal.SIGSTOP)
        return child
    os.fork = stopped
    fork_guarded(lifeline)
    time.sleep(600)
os.waitpid(guardian, os.WUNTRACED)
print(guardian, flush=True)
os._exit(0)
"""


def test_a_guardian_that_is_stopped_as_soon_as_it_has_a_grader_ends_with_the_pool() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STOPPED_AT_ONCE], stdout=subprocess.PIPE, text=True, check=True
    )
    assert wait_until_gone([int(done.stdout)]) == []
