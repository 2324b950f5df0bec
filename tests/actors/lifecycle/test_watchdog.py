"""Reports of actors that do not answer: where each is stuck, whatever blocks it."""

import asyncio
import ctypes
import itertools
import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
import ray
from ray.exceptions import RayActorError

import actors.lifecycle.calls
from actors.lifecycle.calls import Probeable, deadline_of, kill, numbered, one_at_a_time, where_stuck
from actors.lifecycle.team import ActorSpec, Team
from grpo_dist.config import RestartsConfig
from grpo_dist.runtime import stacks
from grpo_dist.runtime.concurrency import deadline
from grpo_dist.runtime.stacks import look, pending_calls
from tests.support.patience import HANG_S, wait_until

pytestmark = pytest.mark.machine

LONG_S = int(HANG_S)  # beyond all tests of this file; sleep of the C library takes whole seconds
LIMITS_S = {name: getattr(actors.lifecycle.calls, name) for name in ("_FIND_S", "_LOOK_S", "_CALLS_S")}


class Stuck(Probeable):
    def __init__(self, mark=None):
        if mark is not None:
            self.sleep_in_python(mark)

    def ready(self):
        return os.getpid()

    def sleep_in_python(self, mark):
        mark.touch()
        end = time.monotonic() + LONG_S
        while time.monotonic() < end:
            time.sleep(0.01)

    def hold_the_interpreter(self, mark=None):
        if mark is not None:
            mark.touch()
        ctypes.PyDLL(None).sleep(LONG_S)  # a PyDLL keeps the GIL: no other thread runs


class StuckLoop(Probeable):
    async def ready(self):
        return os.getpid()

    async def wait_for_nobody(self, mark):
        mark.touch()
        await self.within()

    async def within(self):
        await asyncio.get_running_loop().create_future()

    async def block_the_loop(self, mark):
        mark.touch()
        time.sleep(LONG_S)

    async def calls(self):
        return pending_calls()


# The innermost line of each actor that is in a call.
LAST = {
    "python": "in sleep_in_python\n      time.sleep(0.01)",
    "init": "in sleep_in_python\n      time.sleep(0.01)",
    "c": "in hold_the_interpreter\n      ctypes.PyDLL(None).sleep(LONG_S)",
    "blocked": "in block_the_loop\n      time.sleep(LONG_S)",
    "waits": "in within\n      await asyncio.get_running_loop().create_future()",
}


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Allow a busy machine more time."""
    for name in LIMITS_S:
        monkeypatch.setattr(actors.lifecycle.calls, name, LONG_S)
    for name in ("_REACT_S", "_TURN_S", "_WHOLE_S"):
        monkeypatch.setattr(stacks, name, LONG_S)


@pytest.fixture(scope="module")
def stuck(ray_cluster, tmp_path_factory):
    """Actors by name, each stuck in a different way, and their processes."""
    directory, marks = tmp_path_factory.mktemp("stuck"), itertools.count(1)

    def mark():
        return directory / str(next(marks))

    sync, loop = one_at_a_time(Stuck).options(num_cpus=0), ray.remote(StuckLoop).options(num_cpus=0)
    names = ["python", "c", "stopped", "dead", "idle"]
    workers = {name: sync.remote() for name in names} | {name: loop.remote() for name in ("waits", "blocked")}
    pids = dict(zip(workers, ray.get([worker.ready.remote() for worker in workers.values()]), strict=True))
    workers["init"] = sync.remote(mark())
    workers["python"].sleep_in_python.remote(mark())
    workers["c"].hold_the_interpreter.remote(mark())
    for _ in range(3):
        workers["waits"].wait_for_nobody.remote(mark())
    workers["blocked"].block_the_loop.remote(mark())
    calls = next(marks) - 1
    os.kill(pids["stopped"], signal.SIGSTOP)
    kill([workers["dead"]])
    with pytest.raises(RayActorError):
        for _ in range(100):  # it may still answer
            ray.get(workers["dead"].ready.remote(), timeout=HANG_S)
            time.sleep(0.05)
    wait_until(lambda: len(list(directory.iterdir())) == calls, "calls have not arrived")
    stuck_ones = workers, pids
    for name, last in LAST.items():  # past the line that touches its mark
        wait_until(lambda name=name, last=last: last in report_of(stuck_ones, name), f"{name} is not there")
    yield stuck_ones
    os.kill(pids["stopped"], signal.SIGCONT)
    del workers["dead"]
    kill(workers.values())


def report_of(stuck, *names):
    workers, _ = stuck
    with pytest.MonkeyPatch.context() as patch:
        if "blocked" in names:  # its event loop never answers
            patch.setattr(actors.lifecycle.calls, "_CALLS_S", LIMITS_S["_CALLS_S"])
        return asyncio.run(where_stuck({name: workers[name] for name in names}))


@pytest.mark.slow
def test_a_report_takes_at_most_ten_seconds(stuck, monkeypatch):
    """Even if Ray's table, a stack dump and the actor's event loop all hang."""

    async def never(*_):
        await asyncio.sleep(LONG_S)

    monkeypatch.setattr(actors.lifecycle.calls, "_call", never)
    monkeypatch.setattr(actors.lifecycle.calls, "look", never)
    for name in ("_LOOK_S", "_CALLS_S"):
        monkeypatch.setattr(actors.lifecycle.calls, name, LIMITS_S[name])
    text = report_of(stuck, "python", "waits")
    assert text.count("its node does not answer within 6 s") == 1
    assert sum(LIMITS_S.values()) <= 10


@pytest.mark.parametrize(("name", "last"), LAST.items())
def test_stacks_omit_the_frames_of_ray_and_end_with_the_most_recent_call(stuck, name, last):
    text = report_of(stuck, name)
    assert last in text and "ray/_private" not in text and "threading.py" not in text
    in_test = [line for line in text.splitlines() if "  File " in line and "test_watchdog.py" in line]
    assert last.startswith(in_test[-1].rpartition(", ")[2])
    if name == "init":
        assert len(in_test) == 2 and in_test[0].endswith("in __init__")
    if name == "waits":
        assert "in no call, it waits for work\n3 call(s) wait in\n" in text
        assert "wait_for_nobody" in in_test[0]


@pytest.mark.slow
def test_actors_of_another_node_are_inspected_there(stuck, monkeypatch):
    """Runs a task on the only node of the cluster."""

    class Elsewhere:
        def get_node_id(self):
            return "another"

    monkeypatch.setattr(actors.lifecycle.calls.ray, "get_runtime_context", Elsewhere)
    text = report_of(stuck, "c", "stopped")
    assert "hold_the_interpreter" in text and "stopped, as by SIGSTOP" in text


_FAMILY = """
import os, time
from grpo_dist.runtime.stacks import listen

def parent(*children):
    os.read(told, 1)
    print(*children, flush=True)
    time.sleep(600)

def listening_child():
    listen()
    os.write(tell, b"!")
    time.sleep(600)

listen()
told, tell = os.pipe()
if deaf := os.fork():
    if child := os.fork():
        parent(deaf, child)
    else:
        listening_child()
time.sleep(600)
"""


def test_child_processes_that_can_dump_stacks_are_inspected_too():
    """Such as the workers of an engine over several devices. A plain fork would only repeat its parent."""
    with subprocess.Popen([sys.executable, "-c", _FAMILY], stdout=subprocess.PIPE, text=True) as family:
        deaf, child = (int(pid) for pid in family.stdout.readline().split())
        (text,) = asyncio.run(look([family.pid])).values()
        for pid in (child, deaf, family.pid):
            os.kill(pid, signal.SIGKILL)
    parent, _, other = text.partition(f"\nits process {child}: in\n")
    assert parent.startswith("in\n") and parent.endswith("in parent") and other.endswith("in listening_child")
    assert str(deaf) not in text
    assert asyncio.run(look([family.pid])) == {family.pid: "dead"}


_LONG_DUMP = """
import os, threading, time
from grpo_dist.runtime.stacks import listen

def thread(depth=60):
    thread(depth - 1) if depth else time.sleep(600)

def main_thread():
    print(flush=True)
    time.sleep(600)

for _ in range(60):
    threading.Thread(target=thread, daemon=True).start()
os.nice(5)
listen()
main_thread()
"""


@contextmanager
def starved(program):
    """Start ``program``, wait for a line of output, and let four busy loops share its CPU."""
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})  # which processes inherit
    try:
        command = [sys.executable, "-c"]
        busy = [subprocess.Popen([*command, "while True: pass"]) for _ in range(4)]
        slow = subprocess.Popen([*command, program], stdout=subprocess.PIPE, text=True)
    finally:
        os.sched_setaffinity(0, cpus)
    try:
        slow.stdout.readline()
        yield slow
    finally:
        for process in (slow, *busy):
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_the_dump_of_a_process_starved_of_cpu_is_read_to_the_end():
    """Includes the main thread, which is written last: a pause in the output is not its end."""
    with starved(_LONG_DUMP) as slow:
        texts = [asyncio.run(look([slow.pid]))[slow.pid] for _ in range(10)]
    assert all(text.startswith("in\n") and text.endswith("in main_thread") for text in texts)


@pytest.mark.parametrize("look_number", [1, 2])
def test_a_process_that_dies_during_inspection_hides_no_other(monkeypatch, look_number):
    """It dies before the signal, or before its dump arrives."""
    program = (
        "import time; from grpo_dist.runtime.stacks import listen; "
        "listen(); print(flush=True); time.sleep(600)"
    )
    command, looks = [sys.executable, "-c", program], []
    dies, other = (subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2))

    def status(process):
        looks.append(process)
        if process == dies.pid and looks.count(process) == look_number:
            dies.kill()
            dies.wait()
        return read_status(process)

    read_status = stacks._status
    monkeypatch.setattr(stacks, "_status", status)
    try:
        for process in (dies, other):
            process.stdout.readline()
        reports = asyncio.run(look([dies.pid, other.pid]))
    finally:
        for process in (dies, other):
            process.kill()
            process.communicate()
    assert looks.count(dies.pid) == look_number
    assert reports[dies.pid] == "dead" and reports[other.pid].startswith("in\n")


def test_concurrent_reports_agree(stuck):
    workers, _ = stuck

    async def session():
        same = {name: workers[name] for name in ("c", "waits")}
        return await asyncio.gather(*(where_stuck(same) for _ in range(4)))

    first, *others = asyncio.run(session())
    assert "hold_the_interpreter" in first and others == [first] * 3


def test_an_actor_that_ray_cannot_locate_is_reported(ray_cluster):
    assert asyncio.run(where_stuck({"rollout-0": object()})) == "rollout-0: Ray does not know where"


def test_a_deadline_reports_where_its_workers_are_and_keeps_the_message_of_an_inner_one(stuck):
    workers, _ = stuck

    async def session(seconds, body):
        async with deadline_of(numbered("rollout", [workers["python"]]), seconds, "sync: version 3 travels"):
            await body()

    async def inner():
        async with deadline(0.01, "another"):
            await asyncio.sleep(5)

    with pytest.raises(TimeoutError) as late:
        asyncio.run(session(0.1, lambda: asyncio.sleep(5)))
    first, second, *_ = str(late.value).splitlines()
    assert first == "stage sync: version 3 travels: not finished within 0.1 s"
    assert second.startswith("rollout-0 (node ") and "sleep_in_python" in str(late.value)
    with pytest.raises(TimeoutError) as other:
        asyncio.run(session(5, inner))
    assert str(other.value) == "stage another: not finished within 0.01 s"


@pytest.mark.parametrize("budget", [1, 0])
def test_the_stack_of_a_hung_actor_is_reported_before_it_is_replaced(ray_cluster, tmp_path, caplog, budget):
    """The log has it, or the error that ends the role."""
    restarts = RestartsConfig(max_per_worker=budget, backoff_s=0.05, hang_s=10)

    async def session():
        make = one_at_a_time(Stuck).options(num_cpus=0).remote
        team = Team("reference", [lambda _: make()], ActorSpec(restarts=restarts, start_s=LONG_S))
        team.workers[0].hold_the_interpreter.remote(tmp_path / "mark")
        try:
            async with asyncio.timeout(LONG_S):
                while not (tmp_path / "mark").exists():
                    await asyncio.sleep(0.05)
                team.watch()
                return await team.call("ready")
        finally:
            await team.shutdown()
            if budget:
                kill(team.workers)

    with caplog.at_level(logging.WARNING, "grpo_dist"):
        if budget:
            assert asyncio.run(session()) > 0
            (text, *_) = [r.getMessage() for r in caplog.records if r.name == "grpo_dist"]
        else:
            with pytest.raises(RuntimeError, match="reference-0 is lost") as lost:
                asyncio.run(session())
            text = str(lost.value)
    first, second, *_ = text.splitlines()
    assert first.startswith(
        "reference-0 is lost (stage reference-0 answers its health check: not finished within "
    )
    assert second.startswith("reference-0 (node ") and "in hold_the_interpreter" in text
