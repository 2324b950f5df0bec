"""Faults that can strike a job.

``ready`` tells whether there is a victim, ``strike`` harms it and returns the event, and ``while_down`` is
called when the job has ended because of it, before the next launch.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Protocol

import psutil

from . import sandbox
from .events import SUPERVISED, Event, Visit
from .find import doing, is_stopped, role_of
from .job import Job

_PIDFD_GETFD = 438  # the number of the system call, on every architecture


class Skip(Exception):
    """The reason why this kind of fault is impossible on this machine."""


class Fault(Protocol):
    @property
    def kind(self) -> str: ...
    def ready(self, job: Job) -> bool: ...
    def strike(self, job: Job, rng: Random) -> Event: ...
    def while_down(self, job: Job, rng: Random, event: Event) -> None: ...


class Plain:
    """Defaults of most kinds."""

    def ready(self, job: Job) -> bool:
        return job.is_warm()

    def while_down(self, job: Job, rng: Random, event: Event) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Worker(Plain):
    """Kills a worker, or stops it as if it hung; with ``at``, only during that call."""

    role: str
    number: signal.Signals
    at: str | None = None

    @property
    def kind(self) -> str:
        return f"{self.number.name} {self.role}" + (f" at {self.at}" if self.at else "")

    def ready(self, job: Job) -> bool:
        return super().ready(job) and bool(self._victims(job))

    def _victims(self, job: Job) -> list[psutil.Process]:
        return [p for p in job.family.workers(self.role) if self.at in (None, doing(p))]

    def strike(self, job: Job, rng: Random) -> Event:
        # If the call has ended meanwhile, any worker of the role is the victim.
        victim = rng.choice(self._victims(job) or job.family.workers(self.role))
        event = event_of(self, job, doing(victim), role=self.role, victim=victim)
        victim.send_signal(self.number)
        return event


@dataclass(frozen=True)
class NodeLoss(Plain):
    """Kills the node of a worker of ``role``, with everything on it."""

    role: str

    @property
    def kind(self) -> str:
        return f"node of {self.role} lost"

    def ready(self, job: Job) -> bool:
        return super().ready(job) and bool(job.family.workers(self.role))

    def strike(self, job: Job, rng: Random) -> Event:
        if job.nodes is None:
            raise Skip("the job has no nodes to lose")
        workers = [worker for worker in job.family.workers(self.role) if job.nodes.holds(worker)]
        if not workers:
            raise Skip("Ray placed the worker on the head node")
        victim = rng.choice(workers)
        event = event_of(self, job, doing(victim), role=self.role, victim=victim)
        job.nodes.lose(victim)
        return event


@dataclass(frozen=True)
class NodeVisit(Plain):
    """Adds a node to the cluster of an elastic job; removes it once an engine has joined."""

    kind: str = "node given and taken"

    def strike(self, job: Job, rng: Random) -> Event:
        if job.nodes is None:
            raise Skip("the job has no cluster that could get a node")
        event = event_of(self, job, "running")
        nodes, node = job.nodes, job.nodes.give()
        return Visit(
            event.kind, event.at, event.step, event.phase, announce=lambda: nodes.announce(node),
            take=lambda: nodes.take(node),
        )  # fmt: skip

    def while_down(self, job: Job, rng: Random, event: Event) -> None:
        assert isinstance(event, Visit)
        event.end()  # the next job begins without it


@dataclass(frozen=True)
class Driver(Plain):
    """Sends the driver a signal that ends it."""

    number: signal.Signals
    starting: bool = False

    @property
    def kind(self) -> str:
        return f"{self.number.name} driver" + (", starting" if self.starting else "")

    def ready(self, job: Job) -> bool:
        return job.is_up and job.is_warm() != self.starting

    def strike(self, job: Job, rng: Random) -> Event:
        event = event_of(self, job, "starting" if not job.is_warm() else "running", victim=job.driver)
        job.signal(self.number)
        return event


@dataclass(frozen=True)
class FullDisk(Plain):
    """Fills the disk of the run, and frees it when the run has ended because of it."""

    refusal: str | None  # see `sandbox.Sandbox`
    kind: str = "disk full"

    def strike(self, job: Job, rng: Random) -> Event:
        if self.refusal:
            raise Skip(self.refusal)
        event = event_of(self, job, "running", victim=job.driver)
        sandbox.fill(job.disk)
        return event

    def while_down(self, job: Job, rng: Random, event: Event) -> None:
        sandbox.free(job.disk)


@dataclass(frozen=True)
class TornFile(Plain):
    """Kills the driver and truncates or changes one of its files before the next launch. Without ``kills``,
    another fault of the group ends the run.
    """

    kills: bool = True
    kind: str = "torn file"

    def ready(self, job: Job) -> bool:
        return job.is_warm() and len(checkpoints(job)) > 1

    def strike(self, job: Job, rng: Random) -> Event:
        event = event_of(self, job, "running", victim=job.driver)
        if self.kills:
            job.signal(signal.SIGKILL)
        return event

    def while_down(self, job: Job, rng: Random, event: Event) -> None:
        if rng.random() < 0.7:
            event.torn = tear_checkpoint(job, rng)
        else:
            tear_line(job, rng)


@dataclass(frozen=True)
class CutConnection(Plain):
    """Resets a TCP connection between two processes of the job, at both ends."""

    kind: str = "connection cut"

    def ready(self, job: Job) -> bool:
        return super().ready(job) and bool(connections(job))

    def strike(self, job: Job, rng: Random) -> Event:
        candidates = connections(job)
        pair = rng.choice(sorted({c.pair for c in candidates}))  # each pair is equally likely
        connection = rng.choice([c for c in candidates if c.pair == pair])
        event = event_of(self, job, pair)
        reset(connection)
        return event


def event_of(
    fault: Fault, job: Job, phase: str, *, role: str | None = None, victim: psutil.Process | None = None
) -> Event:
    return Event(fault.kind, time.monotonic(), job.last_step(), phase, role=role, victim=victim)


@dataclass(frozen=True)
class Connection:
    process: psutil.Process
    descriptor: int
    pair: str  # the roles at its ends, "policy-policy"


def connections(job: Job) -> list[Connection]:
    """Return established connections of workers and driver with each other and with Ray."""
    ends: dict[tuple[str, int], str] = {}
    candidates = []
    for process in job.family.living():
        role = "driver" if process.pid == job.pid else role_of(process) or "ray"
        with suppress(psutil.Error):
            for c in process.net_connections(kind="tcp"):
                if c.status == psutil.CONN_ESTABLISHED and c.fd >= 0:
                    ends[tuple(c.laddr)] = role
                    if role != "ray" and not is_stopped(process):
                        candidates.append((process, c.fd, role, tuple(c.raddr)))
    return [
        Connection(process, fd, "-".join(sorted([role, ends[peer]])))
        for process, fd, role, peer in candidates
        if peer in ends
    ]


def reset(connection: Connection) -> None:
    """Give both ends ECONNRESET: pidfd_getfd(2) duplicates the socket into this process, and connecting it to
    AF_UNSPEC resets it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    pidfd = os.pidfd_open(connection.process.pid)
    try:
        duplicate = libc.syscall(_PIDFD_GETFD, pidfd, connection.descriptor, 0)
    finally:
        os.close(pidfd)
    if duplicate < 0:
        raise Skip(f"sockets of another process are not accessible ({os.strerror(ctypes.get_errno())})")
    with closing(socket.socket(fileno=duplicate)):
        unspecified = ctypes.create_string_buffer(16)  # struct sockaddr of AF_UNSPEC
        libc.connect(duplicate, unspecified, 16)


def checkpoints(job: Job) -> list[Path]:
    """Return checkpoint directories, oldest first."""
    return sorted((job.run_dir / "checkpoints").glob("step_*"))


def tear_checkpoint(job: Job, rng: Random) -> str:
    """Truncate a random file of the newest checkpoint, or flip one bit. Return its relative name."""
    newest = checkpoints(job)[-1]
    path = rng.choice(sorted(p for p in newest.rglob("*") if p.is_file() and p.stat().st_size))
    content = bytearray(path.read_bytes())
    at = rng.randrange(len(content))
    if rng.random() < 0.5:
        del content[at:]
    else:
        content[at] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return str(path.relative_to(newest))


def tear_line(job: Job, rng: Random) -> None:
    """Append half a line to a log file, as if the driver was killed while writing."""
    path = job.run_dir / rng.choice(["metrics.jsonl", "ledger.jsonl"])
    last = path.read_bytes().splitlines()[-1]
    with path.open("ab") as file:
        file.write(last[: rng.randrange(1, len(last))])


def step_faults(refusal: str | None) -> list[Fault]:
    """Return one fault of each kind that strikes during steps. ``refusal``: see `sandbox.Sandbox`."""
    hurt = [
        Worker(role, number)
        for role in (*SUPERVISED, "grader", "policy")
        for number in (signal.SIGKILL, signal.SIGSTOP)
    ]
    hurt += [
        Worker("tool", signal.SIGKILL),
        Worker("rollout", signal.SIGKILL, at="receive_weights"),
        Worker("rollout", signal.SIGSTOP, at="receive_weights"),
        Worker("policy", signal.SIGKILL, at="send_weights"),
        Worker("policy", signal.SIGSTOP, at="send_weights"),
    ]
    ends: list[Fault] = [Driver(signal.SIGKILL), Driver(signal.SIGTERM), FullDisk(refusal), TornFile()]
    return [*hurt, *ends, CutConnection()]


def node_faults() -> list[Fault]:
    """Return one fault of each kind for a job on several nodes."""
    return [NodeLoss(role) for role in ("rollout", "policy", "reward")]


def visit_faults() -> list[Fault]:
    """Return one fault of each kind for a job with elastic engines."""
    return [NodeVisit()]


def start_faults() -> list[Fault]:
    """Return one fault of each kind that strikes while the job starts."""
    return [Driver(signal.SIGKILL, starting=True), Driver(signal.SIGTERM, starting=True)]
