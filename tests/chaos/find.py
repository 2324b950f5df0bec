"""Finds the processes of one job: the ones with its mark, and their descendants, also later orphans.
No other process is ever signalled, because other jobs run on the same machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

import psutil

MARK = "GRPO_DIST_CHAOS"  # environment variable that all processes of the job inherit

_ROUNDS, _GONE_S = 10, 5.0

# Text in the command line of a worker.
_TITLES = {
    "rollout": "ray::RolloutWorker",
    "reward": "ray::RewardWorker",
    "reward-model-quality": "ray::RewardModelWorker",
    "reference": "ray::ReferenceWorker",
    "policy": "ray::PolicyWorker",
    "environment": "ray::EnvironmentWorker",
    "grader": "grpo_dist.rewards.child",
    "tool": "grpo_dist.environments.sandbox.zygote",
}
# Only clusters of nodes have one: a run's private Ray starts none. A raylet names its agent in its arguments.
_DASHBOARD = "/ray/dashboard/dashboard.py"
_OF_RAY = (
    "/ray/core/", "/ray/_private/", "/ray/autoscaler/", "/ray/dashboard/", "ray::IDLE", "Agent",
    "ray-dashboard",
)  # fmt: skip


class Family:
    """Processes with ``MARK`` = ``mark`` in their environment, except those that are ``spared``."""

    def __init__(self, mark: str, spared: Callable[[psutil.Process], bool] = lambda _: False) -> None:
        self._mark, self._spared = mark, spared
        self._known: dict[int, psutil.Process] = {}

    def living(self) -> list[psutil.Process]:
        """Return all live processes except zombies. Remembers the ones that lose parent and environment."""
        for process in psutil.process_iter():
            if process.pid not in self._known and self._belongs(process):
                self._known[process.pid] = process
        self._known = {pid: process for pid, process in self._known.items() if lives(process)}
        return [process for process in self._known.values() if not self._spared(process)]

    def workers(self, role: str) -> list[psutil.Process]:
        """Return workers of ``role`` that are alive and not stopped, by pid."""
        workers = [p for p in self.living() if _has_role(p, role) and not is_stopped(p)]
        return sorted(workers, key=lambda p: p.pid)

    def kill(self) -> None:
        """Kill all processes of the job, including those started meanwhile."""
        for _ in range(_ROUNDS):
            left = self.living()
            for process in left:
                with suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(left, timeout=_GONE_S)
            if not left:
                return

    def _belongs(self, process: psutil.Process) -> bool:
        if process.pid == os.getpid():
            return False
        with suppress(psutil.Error):
            return process.environ().get(MARK) == self._mark or process.ppid() in self._known
        return False


def is_of_ray(process: psutil.Process) -> bool:
    """Return whether the process is part of Ray: a server, an agent, a helper of one, or an idle worker."""
    if any(text in title(process) for text in _OF_RAY):
        return True
    with suppress(psutil.Error):  # the dashboard's multiprocessing helpers have no Ray name
        parent = process.parent()
        return parent is not None and _DASHBOARD in title(parent)
    return False


def role_of(process: psutil.Process) -> str | None:
    """Return the role of a worker; None for another process."""
    return next((role for role, text in _TITLES.items() if text in title(process)), None)


def _has_role(process: psutil.Process, role: str) -> bool:
    """Match a worker by command line, except a grader's guardian: its loss would go unnoticed. A tool is the
    process of an episode; its parent is the keeper, its grandparent the zygote.
    """
    wanted = _TITLES[role]
    if wanted not in title(process):
        return False
    with suppress(psutil.Error):
        if role == "tool":
            return all(wanted in title(parent) for parent in [*process.parents(), process][:2])
        return role != "grader" or not any(wanted in title(child) for child in process.children())
    return False


def title(process: psutil.Process) -> str:
    """Return the command line; "" for a process that is gone."""
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def doing(process: psutil.Process) -> str:
    """Return the method a worker runs, from its Ray title: ``ray::RolloutWorker.sample`` -> ``sample``."""
    name = title(process).split()[0] if title(process) else ""
    return name.partition(".")[2] or "idle" if name.startswith("ray::") else "running"


def lives(process: psutil.Process) -> bool:
    """Return whether the process is alive: not a zombie, nor another process with the same id."""
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def is_stopped(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.status() == psutil.STATUS_STOPPED
    return False
