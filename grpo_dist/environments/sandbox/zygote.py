"""The zygote: imports a program, then forks a keeper per episode, which forks a worker.

It is the parent of all keepers and ends with its owner. It is idle between starts and ends of episodes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from grpo_dist.environments.sandbox.isolation import EpisodeSlot, Isolation, Limits, remove_tree
from grpo_dist.environments.sandbox.keeper import Keeper
from grpo_dist.runtime.processes import (
    become_subreaper,
    kill_descendants,
    limit_address_space,
    used_address_space,
)

_MESSAGE = 1 << 16  # maximum bytes of a control message, one datagram
_PID = struct.Struct("!i")


@dataclass(slots=True)
class _KeeperProcess:
    """A live keeper."""

    episode: int
    pid: int
    slot: EpisodeSlot


class Zygote:
    """Forks and ends keepers on the owner's requests."""

    def __init__(self, control: socket.socket, settings: dict[str, Any], directory: Path) -> None:
        self._control, self._directory = control, directory
        self._limits = Limits(**settings["limits"])
        self._isolation = Isolation(**settings["isolation"]) if settings["isolation"] else None
        self._arguments: dict[str, Any] = settings["arguments"]
        module, _, name = settings["program"].partition(":")
        self._program: Callable[..., object] = getattr(importlib.import_module(module), name)
        if (preload := getattr(self._program, "preload", None)) is not None:
            preload(**self._arguments)
        self._keepers: dict[int, _KeeperProcess] = {}  # by process id
        self._free: list[int] = []  # free slots of ended episodes
        self._slots = 0

    def run(self) -> None:
        """Serve until the owner is gone."""
        become_subreaper()
        self._lifeline, self._holds_lifeline = os.pipe()
        self._wake, self._woken = os.pipe()
        for descriptor in (self._wake, self._woken):
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._woken)
        self._used, self._home = used_address_space(), os.getcwd()
        if self._isolation and self._isolation.first_user is not None:
            os.chmod(self._directory, 0o711)  # episodes may enter their directories in it
        gc.collect()
        gc.freeze()  # garbage collection in a child then copies no pages of the parent
        self._send({"ready": True})
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 4096)
                self._reap()
            if self._control.fileno() in ready and not self._obey():
                return

    def close(self) -> None:
        """End all episodes."""
        for keeper in list(self._keepers.values()):
            self._end(keeper)
        while self._keepers:
            self._reap(options=0)

    def _obey(self) -> bool:
        """Read and execute a message. Returns False if the owner is gone."""
        message, descriptors, _, _ = socket.recv_fds(self._control, _MESSAGE, 1)
        if not message:
            return False
        request = json.loads(message)
        if request["do"] == "start":
            channel = socket.socket(fileno=descriptors[0])
            try:
                self._start(request["episode"], channel)
                self._send({"episode": request["episode"], "is": "started"})
            except OSError as error:
                reason = f"{type(error).__name__}: {error}"
                self._send({"episode": request["episode"], "is": "failed", "reason": reason})
            finally:
                channel.close()  # after the message, so the owner gets the reason
        else:
            for keeper in self._keepers.values():
                if keeper.episode == request["episode"]:
                    self._end(keeper)
        return True

    def _start(self, episode: int, channel: socket.socket) -> None:
        if not self._free:
            self._free.append(self._slots)
            self._slots += 1
        number = self._free.pop()
        slot = EpisodeSlot(number, f"{self._directory}/{number}")
        try:
            if self._isolation:
                self._isolation.prepare(slot)
            pid = self._fork_keeper(slot, channel)
        except BaseException:
            self._release(slot)
            raise
        self._keepers[pid] = _KeeperProcess(episode, pid, slot)

    def _fork_keeper(self, slot: EpisodeSlot, channel: socket.socket) -> int:
        """Fork a process that enters namespaces and forks the keeper as their first process."""
        read, write = os.pipe()
        first = os.fork()
        if not first:
            try:
                os.close(read)
                if self._isolation:
                    self._isolation.enter(slot)
                keeper = os.fork()
                if not keeper:
                    os.close(write)
                    self._keep(slot, channel)
                os.write(write, _PID.pack(keeper))
            except BaseException as error:
                os.write(write, _PID.pack(0) + f"{type(error).__name__}: {error}".encode()[:1000])
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as report:
            message = report.read()
        os.waitpid(first, 0)
        pid = _PID.unpack(message[: _PID.size])[0] if len(message) >= _PID.size else 0
        if not pid:
            reason = message[_PID.size :].decode(errors="replace")
            raise OSError(reason or "the episode's process could not be started")
        return pid

    def _keep(self, slot: EpisodeSlot, channel: socket.socket) -> NoReturn:
        """Run the keeper of an episode."""
        try:
            self._control.close()
            for descriptor in (self._holds_lifeline, self._wake, self._woken):
                os.close(descriptor)
            contained = bool(self._isolation and self._isolation.contains_processes)
            if self._isolation:
                self._isolation.settle(slot, self._limits)
            else:
                os.chdir("/proc")
            watched = self._isolation.watched(slot) if self._isolation else ""
            Keeper(
                self._worker(slot),
                channel,
                self._lifeline,
                self._limits,
                contained=contained,
                watched=watched,
            ).run()
        finally:
            os._exit(1)

    def _worker(self, slot: EpisodeSlot) -> Callable[[], Callable[[], object]]:
        def start() -> Callable[[], object]:
            if self._isolation:
                self._isolation.confine(slot, self._limits, self._used)
            else:
                os.chdir(self._home)
                limit_address_space(self._limits.memory_mb, self._used)
            return lambda: self._program(**self._arguments)

        return start

    def _end(self, keeper: _KeeperProcess) -> None:
        """Kill a keeper with its episode's processes. `_reap` cleans up."""
        if not (self._isolation and self._isolation.contains_processes):
            kill_descendants(keeper.pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(keeper.pid, signal.SIGKILL)

    def _reap(self, options: int = os.WNOHANG) -> None:
        """Reap ended processes; report ended keepers to the owner and delete their episodes' files."""
        with contextlib.suppress(ChildProcessError):
            while pid := os.waitpid(-1, options)[0]:
                options = os.WNOHANG
                if (keeper := self._keepers.pop(pid, None)) is not None:
                    self._kill_orphans()
                    self._release(keeper.slot)
                    self._send({"episode": keeper.episode, "is": "ended"})

    def _kill_orphans(self) -> None:
        """Kill processes orphaned by a killed keeper."""
        if self._isolation and self._isolation.contains_processes:
            return
        children = Path(f"/proc/self/task/{os.getpid()}/children")
        child_pids = set(map(int, children.read_text().split())) if children.exists() else set()
        for pid in child_pids - self._keepers.keys():
            kill_descendants(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _release(self, slot: EpisodeSlot) -> None:
        self._free.append(slot.number)
        if self._isolation:
            try:
                self._isolation.remove(slot)
            except OSError as error:  # the other episodes continue
                print(f"sandbox: {slot.path} cannot be deleted: {error}", file=sys.stderr, flush=True)

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `_obey` notices the owner's end
            self._control.send(json.dumps(message).encode())


def main() -> None:
    """Run a zygote. Arguments: descriptor of the control socket, directory for the episodes' files."""
    control = socket.socket(fileno=int(sys.argv[1]))
    directory = Path(sys.argv[2])
    os.umask(0o077)
    try:
        settings = control.recv(_MESSAGE)  # bounded: by the end of the owner
        try:
            zygote = Zygote(control, json.loads(settings), directory)
        except BaseException as error:
            lines = traceback.format_exception(error)
            control.send(
                json.dumps({"failed": "".join(lines[-1:]), "trace": "".join(lines)[-8000:]}).encode()
            )
            return
        try:
            zygote.run()
        finally:
            zygote.close()
    finally:
        remove_tree(str(directory))
