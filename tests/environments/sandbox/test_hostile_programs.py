"""Programs that attack: the right outcome, the next episode works, nobody is reached, and nothing is left."""

import asyncio
import os
import re
import socket
import string
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from grpo_dist.config.environments import SandboxConfig
from grpo_dist.environments.sandbox import kernel
from grpo_dist.environments.sandbox.isolation import Isolation
from grpo_dist.environments.sandbox.kernel import MACHINE
from grpo_dist.environments.sandbox.python import OUTPUT_KB, PythonSandbox
from grpo_dist.runtime.processes import descendants
from tests.environments.sandbox.found import FOUND
from tests.environments.sandbox.hostile import ATTACKS, PRELUDE, REFUSED_CALLS, Attack
from tests.support.patience import HANG_S, wait_until
from tests.support.processes import alive

SETTINGS = SandboxConfig(
    call_s=HANG_S, episode_s=HANG_S, cpu_s=HANG_S, memory_mb=192, files_mb=8, processes=12
)
BRIEF_S = 0.3  # deadline of a program without an end


@dataclass
class Target:
    """What the programs must not reach."""

    directory: Path
    victim: subprocess.Popen
    listener: socket.socket
    unix: socket.socket
    abstract: socket.socket
    values: dict[str, object] = field(default_factory=dict)

    def code(self, attack: Attack) -> str:
        return PRELUDE + string.Template(attack.code).safe_substitute(self.values)

    def check(self) -> None:
        assert self.victim.poll() is None, "a process of the machine was ended"
        assert sorted(os.listdir(self.directory)) == ["file"]
        file, stat = self.directory / "file", os.stat(self.directory / "file")
        assert (file.read_text(), stat.st_mode & 0o777, stat.st_nlink) == ("untouched", 0o666, 1)
        for listener in (self.listener, self.unix, self.abstract):
            with suppress(BlockingIOError):
                pytest.fail(f"{listener.accept()} was reached")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    # Open to every user, so that no mode protects it.
    top = tmp_path_factory.mktemp("outside")
    directory = top / "open"
    directory.mkdir()
    for path in (directory, *directory.parents):
        if path != Path("/tmp") and path != Path("/"):
            path.chmod(0o777 if path == directory else path.stat().st_mode | 0o011)
    (directory / "file").write_text("untouched")
    (directory / "file").chmod(0o666)
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100000)"])
    listener = socket.create_server(("127.0.0.1", 0))
    unix, abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    path, name = f"/tmp/{os.path.basename(top)}-{os.getpid()}.sock", f"grpo-dist-{os.getpid()}"
    unix.bind(path)
    os.chmod(path, 0o777)
    abstract.bind(f"\0{name}")
    for server in (listener, unix, abstract):
        server.listen()
        server.setblocking(False)
    index = 0 if MACHINE == "x86_64" else 1
    numbers = {name: entry[index] for name, entry in kernel._NUMBERS.items()}
    values = {
        "outside": directory,
        "victim": victim.pid,
        "owner": os.getpid(),
        "port": listener.getsockname()[1],
        "unix": path,
        "abstract": name,
        "processes": SETTINGS.processes,
        "memory": SETTINGS.memory_mb,
        "files": SETTINGS.files_mb,
        "calls": REFUSED_CALLS,
        "clone": kernel._CLONE[index],
        "socket": kernel._SOCKET[index],
        "capset": (126, 91)[index],
        **{name: numbers[name] for name in ("shmget", "unshare", "ptrace")},
    }
    yield Target(directory, victim, listener, unix, abstract, values)
    victim.kill()
    victim.wait()
    for server in (listener, unix, abstract):
        server.close()
    os.unlink(path)


class Running:
    """A sandbox with an event loop in a separate thread."""

    def __init__(self, settings: SandboxConfig, isolation: Isolation | None) -> None:
        self.sandbox = PythonSandbox(settings, isolation=isolation)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.notes = self.do(self.sandbox.start())

    def do(self, action):
        return asyncio.run_coroutine_threadsafe(action, self.loop).result(HANG_S)

    def processes(self) -> set[int]:
        return set(filter(alive, descendants(self.host._child.pid)))

    @property
    def host(self):
        return self.sandbox._backend._host

    def close(self) -> None:
        self.do(self.sandbox.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


WITHOUT_NAMESPACES = replace(
    FOUND, spaces=(), user_space=False, own_proc=False, reads_all=FOUND.first_user is not None
)


@pytest.fixture(scope="module", params=["the strongest isolation", "no namespaces"])
def sandbox(request):
    os.environ["GRPO_DIST_TEST_SECRET"] = "swordfish-7"
    isolation = FOUND if request.param == "the strongest isolation" else WITHOUT_NAMESPACES
    if request.param == "no namespaces" and not (FOUND.landlock and FOUND.seccomp):
        pytest.skip("this kernel has no Landlock or no seccomp")
    running = Running(SETTINGS, isolation)
    yield running
    zygote = running.host._child
    running.close()
    assert zygote.returncode == 0
    del os.environ["GRPO_DIST_TEST_SECRET"]


@pytest.mark.parametrize("attack", ATTACKS, ids=[attack.name.replace(" ", "_") for attack in ATTACKS])
def test_an_attack_has_its_outcome_and_reaches_nothing_else(attack: Attack, sandbox: Running, target: Target):
    patient = sandbox.sandbox._settings
    if attack.endless:
        sandbox.sandbox._settings = patient.model_copy(update={"call_s": BRIEF_S})
        sandbox.do(sandbox.sandbox._backend.run("attacker", "1", HANG_S))  # its start does not count
    try:
        result = sandbox.do(sandbox.sandbox.run("attacker", target.code(attack)))
    finally:
        sandbox.sandbox._settings = patient
    assert result.outcome in attack.outcomes, result
    assert attack.shown in result.output, result
    assert "REACHED" not in result.output, result
    assert len(result.output.encode()) < 2 * 1024 * OUTPUT_KB
    result.output.encode()  # text that files and tokenizers take
    other = sandbox.do(sandbox.sandbox.run("another", "x = 1\nx + 1"))
    assert (other.outcome, other.output) == ("ok", "2\n")
    # Whatever it did to its interpreter: no later call gets the result of another one.
    again = sandbox.do(sandbox.sandbox.run("another", "x + 2"))
    assert (again.outcome, again.output) == ("ok", "3\n")
    sandbox.do(sandbox.sandbox.end("attacker"))
    sandbox.do(sandbox.sandbox.end("another"))
    wait_until(lambda: not sandbox.processes(), lambda: f"left: {sandbox.processes()}")
    assert os.listdir(sandbox.host._directory) == []
    target.check()


def test_a_table_of_at_least_40_attacks_has_unique_names():
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) >= 40
    unknown = {name for attack in ATTACKS for name in re.findall(r"\$(\w+)", attack.code)}
    assert unknown <= {
        "outside", "victim", "owner", "port", "unix", "abstract", "processes", "memory", "files", "calls",
        "clone", "socket", "capset", "shmget", "unshare", "ptrace",
    }  # fmt: skip
