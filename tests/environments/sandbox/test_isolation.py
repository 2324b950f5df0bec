"""Each layer of isolation protects by itself; only layers that hold are chosen; missing ones are reported."""

import asyncio
import ctypes
import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_dist.environments.sandbox import kernel, trial
from grpo_dist.environments.sandbox.host import ProcessHost
from grpo_dist.environments.sandbox.isolation import SPACES, Isolation, Limits
from tests.environments.sandbox.found import FOUND as FULL
from tests.environments.sandbox.found import NOTES
from tests.support.documents import ROOT
from tests.support.patience import HANG_S

NOTHING = Isolation()
CONNECT = "import socket; socket.create_connection(('127.0.0.1', {port}), 5)"
SIGNAL = "import os; os.kill({owner}, 0)"
WRITE = "open('{file}', 'a').close()"
READ = "open('{file}').close()"


def result_of(isolation: Isolation, code: str) -> str:
    async def run():
        limits = Limits(memory_mb=128, processes=8, files_mb=4)
        paths = [str(Path(__file__).parent)]
        host = ProcessHost("programs:Attempt", {}, limits=limits, isolation=isolation, code_paths=paths)
        try:
            return await host.ask("a", "run", code, timeout_s=HANG_S)
        finally:
            await host.close()

    return asyncio.run(run())


@pytest.fixture
def names(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0grpo-dist-layer-{os.getpid()}")
        abstract.listen()
        libc = ctypes.CDLL(None)
        segment = libc.shmget(0, 4096, 0o1666)
        yield {
            "port": listener.getsockname()[1],
            "owner": os.getpid(),
            "file": file,
            "abstract": f"\\0grpo-dist-layer-{os.getpid()}",
            "segment": segment,
        }
        libc.shmctl(segment, 0, None)  # removed


def space(*names: str) -> Isolation:
    return replace(NOTHING, spaces=names, user_space=FULL.user_space, own_proc="mount" in names)


LAYERS = {
    "network namespace": (space("net"), CONNECT),
    "process namespace": (space("pid"), SIGNAL),
    "own root": (space("mount"), READ),
    "own root, by attributes": (space("mount"), "import os; os.chmod('{file}', 0o600)"),
    "message namespace": (
        space("ipc"),
        "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.shmat.restype = ctypes.c_long\n"
        "if libc.shmat({segment}, None, 0) == -1: raise OSError('refused')",
    ),
    "name namespace": (
        space("uts"),
        "import socket\nif socket.gethostname() == 'sandbox': raise OSError('another name')",
    ),
    "Landlock, files": (replace(NOTHING, landlock=FULL.landlock), WRITE),
    "Landlock, signals": (replace(NOTHING, landlock=FULL.landlock), SIGNAL),
    "Landlock, TCP": (replace(NOTHING, landlock=FULL.landlock), CONNECT),
    "Landlock, abstract sockets": (
        replace(NOTHING, landlock=FULL.landlock),
        "import socket; socket.socket(socket.AF_UNIX).connect('{abstract}')",
    ),
    "seccomp, sockets": (replace(NOTHING, seccomp=True), CONNECT),
    "seccomp, signals": (replace(NOTHING, seccomp=True), SIGNAL),
    "seccomp, attributes": (replace(NOTHING, seccomp=True), "import os; os.chmod('{file}', 0o600)"),
    "seccomp, truncation": (replace(NOTHING, seccomp=True), "import os; os.truncate('{file}', 0)"),
    "seccomp, namespaces": (
        replace(NOTHING, seccomp=True),
        "import ctypes, os\nif not os.fork(): os._exit(ctypes.CDLL(None).unshare(0x10000000) != 0)\n"
        "if os.wait()[1]: raise OSError('refused')",
    ),
    "user id": (replace(NOTHING, first_user=FULL.first_user), READ),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_alone_refuses_what_is_reached_without_it(layer: str, names):
    isolation, code = LAYERS[layer]
    if not set(isolation.spaces) <= set(FULL.spaces) or isolation.landlock > kernel.landlock_abi():
        pytest.skip("this kernel does not have it")
    if layer == "user id":
        if FULL.first_user is None:
            pytest.skip("needs root")
        os.chmod(names["file"], 0o600)
    if layer.startswith("Landlock") and FULL.landlock < {"files": 1, "TCP": 4}.get(layer.split(", ")[1], 6):
        pytest.skip("this kernel's Landlock does not have it")
    code = code.format(**names)
    assert result_of(NOTHING, code) == "reached"
    assert result_of(isolation, code).startswith("refused")


def test_the_isolation_is_reported_by_topic():
    topics = [line.split(":")[1].strip() for line in NOTES[:4]]
    assert topics == ["processes", "network", "files", "system calls"]
    if FULL.spaces == SPACES and FULL.landlock and FULL.seccomp:
        assert not any("WARNING" in line for line in NOTES)
        assert len(NOTES) == 4


MACHINES = {  # whether an isolation holds there, the spaces chosen, and other choices
    "everything": (
        lambda it: not it.reads_all, SPACES, {"own_proc": True, "seccomp": True, "user_space": False},
    ),
    "only a user namespace": (lambda it: it.user_space, SPACES, {"user_space": True}),
    "only Landlock and seccomp": (
        lambda it: not it.spaces, (), {"landlock": kernel.landlock_abi(), "seccomp": True},
    ),
    "only network and processes": (
        lambda it: set(it.spaces) <= {"net", "pid"} and not it.landlock,
        ("pid", "net"), {"landlock": 0, "seccomp": True},
    ),
    "masked proc": (lambda it: not it.own_proc, SPACES, {"own_proc": False, "seccomp": True}),
    "nothing": (lambda it: False, (), {"landlock": 0, "seccomp": False}),
}  # fmt: skip


@pytest.mark.parametrize("machine", MACHINES)
def test_the_strongest_that_works_is_chosen(machine, monkeypatch):
    works, spaces, others = MACHINES[machine]
    monkeypatch.setattr(trial.os, "geteuid", lambda: 0)
    monkeypatch.setattr(trial, "_first_user", lambda: 61184)
    chosen = trial.choose(works)
    assert chosen.spaces == spaces
    assert {name: getattr(chosen, name) for name in others} == others


def test_without_namespaces_all_other_layers_are_used_here(tmp_path):
    """As root Python's files may be closed to the episodes' users; then Landlock decides what they read."""
    reasons: list[str] = []
    chosen = trial.choose(lambda candidate: not candidate.spaces and trial.try_out(candidate, reasons))
    assert (chosen.landlock, chosen.seccomp) == (kernel.landlock_abi(), kernel.knows_system_calls()), reasons


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("call", ["chown", "setresuid", "kill", "rename"])
def test_root_without_a_right_uses_no_user_ids_of_episodes(call, monkeypatch, tmp_path):
    assert trial._first_user() is not None
    tmp_path.chmod(0o711)
    for parent in tmp_path.parents[:-2]:  # all but / and /tmp
        parent.chmod(parent.stat().st_mode | 0o011)
    monkeypatch.setattr(trial.tempfile, "tempdir", str(tmp_path))
    assert trial._first_user() is not None

    def refuse(*arguments):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, call, refuse)
    assert trial._first_user() is None


@pytest.mark.parametrize(
    ("isolation", "words"),
    [
        (NOTHING,
         ["can end this user's processes", "can reach the network", "what this user can", "all are"]),
        (replace(NOTHING, landlock=3), ["can end this user's processes", "can reach the network"]),
        (replace(NOTHING, landlock=5), ["by UDP and Unix sockets"]),
        (replace(NOTHING, landlock=2), ["can empty any file"]),
        (replace(NOTHING, first_user=61184, seccomp=True), ["what every user of this machine can"]),
    ],
)  # fmt: skip
def test_a_missing_layer_is_a_warning(isolation: Isolation, words: list[str]):
    warnings = "\n".join(line for line in isolation.describe() if "WARNING" in line)
    assert all(text in warnings for text in words), warnings


def test_a_layer_that_does_not_hold_is_not_used(monkeypatch):
    monkeypatch.setattr(trial.kernel, "restrict_by_landlock", lambda *_: None)
    reasons: list[str] = []
    assert not trial.try_out(replace(NOTHING, landlock=FULL.landlock or 1), reasons)
    assert "code still reads files outside" in reasons[0]


def test_a_layer_that_the_kernel_refuses_is_not_used_and_its_reason_is_reported(monkeypatch):
    def refuse(flags):
        raise OSError(1, "unshare: Operation not permitted")

    monkeypatch.setattr("grpo_dist.environments.sandbox.kernel.unshare", refuse)
    reasons: list[str] = []
    assert not trial.try_out(space("net"), reasons)
    assert "net namespaces: PermissionError: [Errno 1] unshare: Operation not permitted" in reasons[0]


UNPRIVILEGED = """
import asyncio, json, os, sys
sys.path.insert(0, sys.argv[1])
if os.geteuid() == 0:
    os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
from grpo_dist.environments.sandbox.host import ProcessFailure
from grpo_dist.environments.sandbox.host import ProcessHost
from grpo_dist.environments.sandbox.isolation import SPACES, Isolation
from grpo_dist.environments.sandbox.isolation import Limits
from grpo_dist.environments.sandbox import trial

version, codes, reasons = int(sys.argv[2]), json.loads(sys.argv[3]), []
limits = Limits(memory_mb=128, processes=8, files_mb=4, output_kb=16)
strongest = Isolation(spaces=SPACES, user_space=True, own_proc=True, landlock=version, seccomp=True)
fallback = Isolation(landlock=version, seccomp=True)

async def results(isolation):
    found = []
    program = "grpo_dist.environments.sandbox.interpreter:Interpreter"
    host = ProcessHost(program, {}, limits=limits, isolation=isolation)
    for code in codes:
        try:
            reply = await host.call("a", "run", code, timeout_s=1000)
            found.append([reply.value, reply.output])
        except ProcessFailure as failure:
            found.append([failure.outcome, failure.detail])
    await host.close()
    return found

for isolation in (strongest, fallback):
    works = trial.try_out(isolation, reasons)
    print(json.dumps(asyncio.run(results(isolation)) if works else None))
print(json.dumps(reasons))
"""
# Code, outcome, and what it prints with namespaces; alone, the last layers print an error instead.
UNPRIVILEGED_CASES = [
    ("6 * 7", "ok", "42"),
    (f"import os\nos.kill({os.getpid()}, 0)", "error", "Error"),
    ("open('x', 'wb').write(bytes(2**23))", "error", "OSError"),
    ("open('/dev/shm/../../x', 'w')", "error", "Error"),
    ("import socket; socket.socket()", "error", "PermissionError"),
    (
        "import os, time\nfor _ in range(5):\n  if not os.fork():\n"
        "    x = bytearray(os.urandom(2**20)) * 60\n    time.sleep(900)\ntime.sleep(900)",
        "memory",
        "all processes together",
    ),
    (
        "import os, time\ncount = 0\ntry:\n  while True:\n    if not os.fork(): time.sleep(900)\n"
        "    count += 1\nexcept OSError: print(count)",
        "ok",
        "7",
    ),
]


def python_for_everybody() -> str:
    """Return a Python that a user without privilege can start."""
    code = """
import os, sys
if not os.getuid(): os.setresuid(65534, 65534, 65534)
import colorsys
sys.exit(sys.version_info < (3, 11))
"""
    for python in filter(os.path.exists, (sys.executable, "/usr/bin/python3")):
        if not subprocess.run([python, "-c", code], capture_output=True, timeout=HANG_S).returncode:
            return python
    pytest.skip("Python is closed to other users here")


def test_without_privilege_a_user_namespace_does_the_same():
    codes = [code for code, _, _ in UNPRIVILEGED_CASES]
    command = [python_for_everybody(), "-c", UNPRIVILEGED, str(ROOT), str(FULL.landlock), json.dumps(codes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, cwd="/")
    assert done.returncode == 0, done.stderr
    strongest, fallback, reasons = map(json.loads, done.stdout.splitlines())
    for results in (strongest, fallback):
        for (code, outcome, shown), (actual, output) in zip(UNPRIVILEGED_CASES, results or (), strict=False):
            varies = shown == "7" and results is fallback  # counts the user's other processes, too
            assert actual == outcome and (shown in output or varies), (code, actual, output)
    if strongest is None or fallback is None:
        pytest.skip(f"this kernel does not allow it: {reasons}")


def test_every_refused_call_has_a_number_on_both_machines_or_is_known_to_have_none():
    for table in (kernel._NUMBERS, kernel._ATTRIBUTES, kernel._TRUNCATION, kernel._OTHER_PROCESSES):
        for index in (0, 1):
            numbers = [entry[index] for entry in table.values() if entry[index] is not None]
            assert len(numbers) == len(set(numbers))


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("signals_to", [None, 4711])
def test_the_filter_refuses_and_allows_call_by_call(machine, signals_to, monkeypatch):
    """Interpret the BPF program as the kernel does, also for the other machine type."""
    monkeypatch.setattr(kernel, "MACHINE", machine)
    index = ("x86_64", "aarch64").index(machine)
    only_seccomp = kernel.SyscallFilter(
        unix_sockets=False, attributes=False, truncation=False, signals_to=signals_to
    )
    program = only_seccomp.instructions()

    def verdict(number, *arguments):
        return interpret(program, kernel._AUDIT_ARCH[machine], number, [*arguments, 0, 0, 0, 0, 0, 0][:6])

    refused, allowed = kernel._ERROR | 1, kernel._ALLOW
    for table in (kernel._NUMBERS, kernel._ATTRIBUTES, kernel._TRUNCATION):
        for entry in table.values():
            if entry[index] is not None:
                assert verdict(entry[index]) == refused
    openat = kernel._OPENAT[index]
    assert verdict(openat, 0, 0, os.O_RDONLY | os.O_TRUNC) == verdict(openat, 0, 0, 3 | os.O_TRUNC) == refused
    for flags in (os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, os.O_RDWR | os.O_TRUNC):
        assert verdict(openat, 0, 0, flags) == allowed
    assert verdict((0, 63)[index]) == verdict((1, 64)[index]) == verdict((9, 222)[index]) == allowed
    assert verdict(kernel._CLONE[index], 0x11) == allowed
    assert verdict(kernel._CLONE[index], 0x10000011) == refused
    assert verdict(kernel._SOCKET[index], 1, 1) == verdict(kernel._SOCKET[index], 2, 1) == kernel._ERROR | 13
    assert verdict(kernel._SOCKETPAIR[index], 1, 0x80001) == allowed
    assert verdict(kernel._SOCKETPAIR[index], 1, 2) == kernel._ERROR | 13
    kill, limits = kernel._SIGNALS["kill"][index], kernel._SETTINGS["prlimit64"][index]
    assert verdict(kill, 4711, 9) == verdict(limits, 0) == verdict(limits, 4711) == allowed
    assert verdict(kill, 1, 9) == verdict(limits, 1) == (allowed if signals_to is None else refused)
    assert interpret(program, 0xC0000032, 0, [0] * 6) == kernel._KILL
    program = replace(only_seccomp, truncation=True).instructions()
    assert verdict(kernel._TRUNCATION["truncate"][index]) == allowed
    assert verdict(openat, 0, 0, os.O_RDONLY | os.O_TRUNC) == verdict(kernel._OPENAT2[index]) == allowed
    if machine == "x86_64":
        assert verdict(kernel._X32 + 41, 2, 1) == kernel._ERROR | 38


def interpret(program, architecture, number, arguments):
    at, value = 0, 0
    while True:
        code, true, false, constant = program[at]
        at += 1
        if code == 0x06:
            return constant
        if code == 0x20:
            value = {0: number, 4: architecture}.get(constant)
            if value is None:
                value = arguments[(constant - 16) // 8] & 0xFFFFFFFF
        elif code == 0x54:
            value &= constant
        else:
            test = {0x15: value == constant, 0x35: value >= constant, 0x45: bool(value & constant)}[code]
            at += true if test else false


def test_what_a_machine_does_not_allow_is_one_sentence():
    refusal = "PermissionError: [Errno 1] Operation not permitted"
    reasons = [f"{layer} namespaces: {refusal}" for layer in SPACES] * 2
    (note,) = trial._left_out(replace(FULL, spaces=("uts",), landlock=0), reasons)
    assert note.startswith("sandbox: this machine does not allow mount, ") and "; Landlock (" in note
    assert note.count(refusal) == 1 and "uts" not in note
    assert trial._left_out(replace(FULL, spaces=SPACES, landlock=5, seccomp=True), reasons) == []
