"""Main program of the process that has imported a program and forks a keeper, and it a worker, per episode.

It is the parent of all keepers and ends with its owner. It does nothing between starts and ends of episodes.
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

_MESSAGE = 1 << 16  # bytes of a control message, which is one datagram
_PID = struct.Struct("!i")


@dataclass(slots=True)
class _Kept:
    """A living keeper."""

    episode: int
    pid: int
    slot: EpisodeSlot


class Zygote:
    """Forks and ends keepers as its owner asks."""

    def __init__(self, control: socket.socket, settings: dict[str, Any], directory: Path) -> None:
        self._control, self._directory = control, directory
        self._limits = Limits(**settings["limits"])
        self._isolation = Isolation(**settings["isolation"]) if settings["isolation"] else None
        self._arguments: dict[str, Any] = settings["arguments"]
        module, _, name = settings["program"].partition(":")
        self._program: Callable[..., object] = getattr(importlib.import_module(module), name)
        if (preload := getattr(self._program, "preload", None)) is not None:
            preload(**self._arguments)
        self._kept: dict[int, _Kept] = {}  # by process id
        self._free: list[int] = []  # slots of ended episodes
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
            os.chmod(self._directory, 0o711)  # each episode finds its own directory in it
        gc.collect()
        gc.freeze()  # a collection in a child does not write to, and so copy, every page of the parent
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
        for kept in list(self._kept.values()):
            self._end(kept)
        while self._kept:
            self._reap(options=0)

    def _obey(self) -> bool:
        """Read and execute a message. Returns False when the owner is gone."""
        message, descriptors, _, _ = socket.recv_fds(self._control, _MESSAGE, 1)
        if not message:
            return False
        asked = json.loads(message)
        if asked["do"] == "start":
            channel = socket.socket(fileno=descriptors[0])
            try:
                self._start(asked["episode"], channel)
                self._send({"episode": asked["episode"], "is": "started"})
            except OSError as error:
                reason = f"{type(error).__name__}: {error}"
                self._send({"episode": asked["episode"], "is": "failed", "reason": reason})
            finally:
                channel.close()  # behind the message, so that the owner finds the reason
        else:
            for kept in self._kept.values():
                if kept.episode == asked["episode"]:
                    self._end(kept)
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
        self._kept[pid] = _Kept(episode, pid, slot)

    def _fork_keeper(self, slot: EpisodeSlot, channel: socket.socket) -> int:
        """Fork a process that enters namespaces and forks the keeper, which is the first in its namespace."""
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
            raise OSError(reason or "no process of the episode could be made")
        return pid

    def _keep(self, slot: EpisodeSlot, channel: socket.socket) -> NoReturn:
        """Be the keeper of an episode."""
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

    def _end(self, kept: _Kept) -> None:
        """Kill a keeper with all processes of its episode. `_reap` does the rest."""
        if not (self._isolation and self._isolation.contains_processes):
            kill_descendants(kept.pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(kept.pid, signal.SIGKILL)

    def _reap(self, options: int = os.WNOHANG) -> None:
        """Reap ended processes; notify the owner of ended keepers, and delete the files of their episodes."""
        with contextlib.suppress(ChildProcessError):
            while pid := os.waitpid(-1, options)[0]:
                options = os.WNOHANG
                if (kept := self._kept.pop(pid, None)) is not None:
                    self._kill_orphans()
                    self._release(kept.slot)
                    self._send({"episode": kept.episode, "is": "ended"})

    def _kill_orphans(self) -> None:
        """Kill processes that became children of this one because their keeper was killed."""
        if self._isolation and self._isolation.contains_processes:
            return
        children = Path(f"/proc/self/task/{os.getpid()}/children")
        orphans = set(map(int, children.read_text().split())) - set(self._kept) if children.exists() else ()
        for pid in orphans:
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
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `_obey` finds the owner gone
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
