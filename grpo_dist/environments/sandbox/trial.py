"""Finds the isolation layers that this machine allows, by using them and trying to break out."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import secrets
import signal
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from grpo_dist.environments.sandbox import kernel
from grpo_dist.environments.sandbox.isolation import SPACES, EpisodeSlot, Isolation, Limits, remove_tree
from grpo_dist.runtime.processes import run_child, used_address_space

_TRIAL_S = 300.0
_LIMITS = Limits(memory_mb=256, files_mb=4)
# User ids for episodes: above human and container ids; else systemd's ids of transient users.
_USERS, _USERS_IN_CONTAINERS = (0x70000000, 0x7F000000), (61184, 65520)
_UNUSED_MODULE = "colorsys"  # in the standard library, imported by nothing else


async def find_isolation() -> tuple[Isolation, list[str]]:
    """Return the strongest isolation that works here, and sentences that describe each protection.

    Raises RuntimeError if the trial itself fails.
    """
    status, output, errors = await run_child(__name__, deadline_s=_TRIAL_S)
    if status:
        raise RuntimeError(f"the trial of the sandbox failed: {errors[-2000:]}")
    result = json.loads(output)
    isolation = Isolation(**result["isolation"] | {"spaces": tuple(result["isolation"]["spaces"])})
    return isolation, [*isolation.describe(), *_left_out(isolation, result["reasons"])]


def _left_out(isolation: Isolation, reasons: Sequence[str]) -> list[str]:
    """Return a sentence with the missing layers and why their trials failed; [] if none is missing."""
    spaces = [name for name in SPACES if name not in isolation.spaces]
    layers = [f"{', '.join(spaces)} namespaces"] if spaces else []
    layers += ["Landlock"] * (not isolation.landlock) + ["seccomp"] * (not isolation.seccomp)
    if not layers:
        return []
    failures = dict.fromkeys(reason.partition(": ")[2] for reason in reasons)
    return [f"sandbox: this machine does not allow {'; '.join(layers)} ({'; '.join(failures) or 'unknown'})"]


def main() -> None:
    """Print the chosen isolation, and the reasons of failed trials, as JSON."""
    reasons: list[str] = []
    isolation = choose(lambda candidate: try_out(candidate, reasons))
    print(json.dumps({"isolation": asdict(isolation), "reasons": reasons}))


def choose(works: Callable[[Isolation], bool]) -> Isolation:
    """Return the strongest isolation for which ``works`` is true."""
    plain = Isolation(first_user=_first_user())
    best = plain
    for user_space in (False, True) if os.geteuid() == 0 else (True,):
        for candidate in _try_spaces(replace(plain, user_space=user_space), works):
            if len(candidate.spaces) > len(best.spaces):
                best = candidate
        if best.spaces == SPACES:
            break
    version = kernel.landlock_abi()
    candidates = [replace(best, landlock=version)] if version else []
    if version and best.first_user is not None:
        candidates.append(replace(best, landlock=version, reads_all=True))
    best = next(filter(works, candidates), best)
    filtered = replace(best, seccomp=True)
    if kernel.knows_system_calls() and works(filtered):
        best = filtered
    return best


def _try_spaces(plain: Isolation, works: Callable[[Isolation], bool]) -> Iterator[Isolation]:
    """Yield working isolations: all namespaces, or all that work individually, together."""
    for own_proc in (True, False):
        candidate = replace(plain, spaces=SPACES, own_proc=own_proc)
        if works(candidate):
            yield candidate
            return
    single = tuple(name for name in SPACES if works(replace(plain, spaces=(name,))))
    candidate = replace(plain, spaces=single)
    if single and works(candidate):
        yield candidate


def _first_user() -> int | None:
    """Return the first user id for episodes; None if this process may not switch users."""
    if os.geteuid() != 0:
        return None
    for first, end in (_USERS, _USERS_IN_CONTAINERS):
        user = first + secrets.randbelow((end - first) // 2)
        if _controls_user(user):
            return user
    return None


def _controls_user(user: int) -> bool:
    """Return whether this process can start a process as that user, kill it, and delete its files. Root in a
    container may lack any of these rights.
    """
    directory = tempfile.mkdtemp(prefix="grpo-dist-trial-")
    begins, waits = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        with contextlib.suppress(OSError):
            os.close(waits[1])
            os.chown(directory, user, user)
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            os.makedirs(f"{directory}/a/b", 0o700)
            os.write(begins[1], b"x")
            os.read(waits[0], 1)  # until it is killed, or the other end closes
        os._exit(1)
    os.close(begins[1])
    ended = False
    began = os.read(begins[0], 1) == b"x"
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
        ended = True
    for descriptor in (begins[0], *waits):
        os.close(descriptor)
    os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        remove_tree(directory)
    return began and ended and not os.path.exists(directory)


def try_out(isolation: Isolation, reasons: list[str]) -> bool:
    """Return whether a process works in this isolation and cannot break out."""
    directory = tempfile.mkdtemp(prefix="grpo-dist-trial-")
    secret = Path(directory, "secret")
    secret.write_text("secret")
    secret.chmod(0o600)
    if isolation.first_user is not None:
        os.chmod(directory, 0o711)
    slot = EpisodeSlot(0, f"{directory}/0")
    read, write = os.pipe()
    outside = os.getpid()
    try:
        isolation.prepare(slot)
        first = os.fork()
        if not first:
            _run_in_child(write, lambda: _enter_and_run(isolation, slot, outside, secret, write))
        os.close(write)
        with os.fdopen(read, "rb") as report:
            failure = report.read().decode(errors="replace")
        status = os.waitpid(first, 0)[1]
        if failure or status:
            reasons.append(f"{_describe(isolation)}: {failure or f'ended with status {status}'}")
        return not (failure or status)
    finally:
        remove_tree(directory)


def _enter_and_run(isolation: Isolation, slot: EpisodeSlot, outside: int, secret: Path, write: int) -> None:
    isolation.enter(slot)
    _await_child(write, lambda: _keeper(isolation, slot, outside, secret, write))


def _keeper(isolation: Isolation, slot: EpisodeSlot, outside: int, secret: Path, write: int) -> None:
    used = used_address_space()
    isolation.settle(slot, _LIMITS)
    _await_child(write, lambda: _worker(isolation, slot, outside, secret, used))


def _worker(isolation: Isolation, slot: EpisodeSlot, outside: int, secret: Path, used: int) -> None:
    isolation.confine(slot, _LIMITS, used)
    importlib.import_module(_UNUSED_MODULE)
    Path("file").write_text("text")
    Path("file").unlink()
    hidden = "mount" in isolation.spaces or isolation.landlock
    if hidden or isolation.first_user is not None:
        _refused("reads files outside", lambda: secret.read_text())
        _refused("writes files outside", lambda: secret.with_name("new").write_text(""))
    if "mount" in isolation.spaces or isolation.landlock >= kernel.TRUNCATION_FROM or isolation.seccomp:
        _refused("truncates files outside", lambda: os.truncate(secret, 0))
    if "pid" in isolation.spaces or isolation.landlock >= kernel.SIGNALS_FROM or isolation.seccomp:
        _refused("signals processes outside", lambda: os.kill(outside, 0))
    if isolation.seccomp:
        _refused("opens sockets", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    if "net" in isolation.spaces:
        _refused("has a network", _use_network)


def _use_network() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as connection:
        connection.connect(("192.0.2.1", 9))  # a documentation address; nothing is sent


def _refused(what: str, attempt: Callable[[], object]) -> None:
    try:
        attempt()
    except OSError:
        return
    raise RuntimeError(f"code still {what}")


def _run_in_child(write: int, action: Callable[[], None]) -> None:
    """Run ``action`` and exit; write the reason if it fails."""
    code = 1
    try:
        action()
        code = 0
    except BaseException as error:
        os.write(write, "".join(traceback.format_exception_only(error)).strip().encode()[:500])
    finally:
        os._exit(code)


def _await_child(write: int, action: Callable[[], None]) -> None:
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _run_in_child(write, action)
    status = os.waitpid(pid, 0)[1]
    if status:
        os._exit(1)


def _describe(isolation: Isolation) -> str:
    kind = "user namespace with " if isolation.user_space else ""
    layers = [kind + ", ".join(isolation.spaces) + " namespaces"] if isolation.spaces else []
    layers += [f"Landlock {isolation.landlock}"] * bool(isolation.landlock) + ["seccomp"] * isolation.seccomp
    return " + ".join(layers) or "a separate user id"
