"""Confinement of the processes of an episode, in layers that do not depend on each other.

    namespaces   own processes, own network without any interface, own root with a directory of its own
    user         as root: a user id of its own, which owns nothing outside
    Landlock     files outside can be read where Python needs them, and never written; no signals outside
    seccomp      system calls that a calculation does not need are refused, sockets among them
    limits       of memory, CPU time, processes, files

Which of them a machine allows is found by `trial.find_isolation`, never assumed.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import socket
import sys
import tempfile
from dataclasses import dataclass

from grpo_dist.environments.sandbox import landlock, linux, root
from grpo_dist.environments.sandbox.limits import Limits
from grpo_dist.environments.sandbox.seccomp import SyscallFilter

_FLAGS = {
    "mount": linux.CLONE_NEWNS,
    "pid": linux.CLONE_NEWPID,
    "net": linux.CLONE_NEWNET,
    "ipc": linux.CLONE_NEWIPC,
    "uts": linux.CLONE_NEWUTS,
}
SPACES = tuple(_FLAGS)
_OPEN_FILES = 256
_STACK = 8 * 2**20


@dataclass(frozen=True, slots=True)
class EpisodeSlot:
    """What one episode has to itself on the host.

    Attributes:
        number: one that no other live episode has.
        path: of its directory.
    """

    number: int
    path: str


@dataclass(frozen=True, slots=True)
class Isolation:
    """The layers that are used.

    Attributes:
        spaces: namespaces of an episode's own, of `SPACES`.
        user_space: whether a user namespace is needed to make them: without privilege.
        own_proc: whether the own root has a /proc of the own processes; otherwise it has none.
        first_user: user id of slot 0, and so on; None: the user that runs this, who is not root.
        landlock: its ABI; 0: not used.
        seccomp: whether calls are filtered.
        reads_all: as root with a user id of its own, where Python's files are closed to others: keep the
            right to read all files, which Landlock then limits.
    """

    spaces: tuple[str, ...] = ()
    user_space: bool = False
    own_proc: bool = False
    first_user: int | None = None
    landlock: int = 0
    seccomp: bool = False
    reads_all: bool = False

    @property
    def contains_processes(self) -> bool:
        """Whether the end of an episode's first process ends all of them."""
        return "pid" in self.spaces

    def user(self, slot: EpisodeSlot) -> int:
        return os.getuid() if self.first_user is None else self.first_user + slot.number

    def home(self, slot: EpisodeSlot) -> str:
        """Return the episode's directory, as its processes see it."""
        return root.HOME if "mount" in self.spaces else slot.path

    def watched(self, slot: EpisodeSlot) -> str:
        """Return the directory whose size no file system of its own limits; "": none."""
        return "" if "mount" in self.spaces else slot.path

    def prepare(self, slot: EpisodeSlot) -> None:
        """Make the directory of an episode; in the zygote."""
        os.mkdir(slot.path, 0o700)
        if self.first_user is not None:
            os.chown(slot.path, self.user(slot), self.user(slot))

    def remove(self, slot: EpisodeSlot) -> None:
        """Delete it with everything in it; in the zygote."""
        root.remove_tree(slot.path)

    def enter(self, slot: EpisodeSlot) -> None:
        """Enter new namespaces; in the parent of the keeper, which is then the first process there."""
        flags = sum(_FLAGS[name] for name in self.spaces)
        if not flags:
            return
        if not self.user_space:
            linux.unshare(flags)
            return
        user = self.user(slot)
        if self.first_user is not None:
            _become(user)
        linux.process_option(linux.PR_SET_DUMPABLE, 1)  # or the maps below would belong to root
        group = os.getgid()
        linux.unshare(linux.CLONE_NEWUSER | flags)
        for name, line in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)

    def settle(self, slot: EpisodeSlot, limits: Limits) -> None:
        """Prepare the namespaces; in the keeper. Its working directory is the host's /proc from then on."""
        os.chdir("/proc")
        os.umask(0o022)
        if "uts" in self.spaces:
            socket.sethostname("sandbox")
        if "mount" in self.spaces:
            root.build_root(slot.path, self.user(slot), limits.files_mb, own_proc=self.own_proc)
        linux.process_option(linux.PR_SET_DUMPABLE, 0)  # no other process can read its memory

    def confine(self, slot: EpisodeSlot, limits: Limits, used: int) -> None:
        """Give up everything that is not needed, for good; in the worker, before it runs foreign code.

        Args:
            used: address space of the process before it does anything, bytes.
        """
        home = self.home(slot)
        self._set_surroundings(home)
        if self.first_user is not None and not self.user_space:
            _become(self.user(slot), keep=self.reads_all)
            if self.reads_all:  # before Landlock, which opens the directories that it allows
                linux.set_capabilities(1 << linux.CAP_DAC_READ_SEARCH)
        os.chdir(home)
        linux.process_option(linux.PR_SET_DUMPABLE, 1)
        _limit(limits, used, others=self._others())
        linux.process_option(linux.PR_SET_NO_NEW_PRIVS, 1)
        if self.landlock:
            readable = ["/"] if "mount" in self.spaces else root.readable()
            landlock.restrict(self.landlock, readable, [home], root.DEVICES)
        if not self.reads_all:
            linux.set_capabilities(0)
        if self.seccomp:
            alone = "pid" in self.spaces or self.landlock >= landlock.SIGNALS_FROM
            SyscallFilter(
                unix_sockets="mount" in self.spaces and "net" in self.spaces,
                attributes="mount" in self.spaces,
                signals_to=None if alone else os.getpid(),
            ).install()

    def describe(self) -> list[str]:
        """Return one sentence for each thing that is protected: by what, or that it is not."""
        return [
            f"sandbox: processes: {self._processes()}",
            f"sandbox: network: {self._network()}",
            f"sandbox: files: {self._files()}",
            "sandbox: system calls: " + ("seccomp filter" if self.seccomp else "WARNING: all are allowed"),
        ]

    def _processes(self) -> str:
        own = f"user ids from {self.first_user}" if self.first_user is not None else ""
        own = own or ("" if self.user_space else "number limited only together with the user's other ones")
        if "pid" in self.spaces:
            return ", ".join(filter(None, ("own namespace", own)))
        if self.landlock >= landlock.SIGNALS_FROM:
            return ", ".join(filter(None, ("others are seen, Landlock refuses signals to them", own)))
        if self.seccomp:
            return ", ".join(filter(None, ("others are seen, seccomp refuses signals to them", own)))
        if own and self.first_user is not None:
            return f"others are seen, {own}"
        return "WARNING: code can end this user's processes"

    def _network(self) -> str:
        if "net" in self.spaces:
            return "own namespace without an interface" + (", seccomp refuses sockets" * self.seccomp)
        if self.seccomp:
            return "seccomp refuses sockets"
        if self.landlock >= 4:
            return "WARNING: Landlock refuses TCP; code can reach the network by UDP and Unix sockets"
        return "WARNING: code can reach the network"

    def _files(self) -> str:
        own = "user ids of their own" if self.first_user is not None else ""
        if "mount" in self.spaces:
            return "own root, writes only in the episode's directory" + (", Landlock" * bool(self.landlock))
        if self.landlock:
            start = "Landlock, writes only in the episode's directory"
            return f"{start}, {own}" if own else start
        if own:
            return f"WARNING: {own}, so code can read and write what every user of this machine can"
        return "WARNING: code can read and write what this user can"

    def _others(self) -> int:
        """Return how many processes and threads the kernel counts together with an episode's."""
        if self.first_user is not None or self.user_space:
            return int(self.user_space)  # the keeper
        return _threads_of_user()

    def _set_surroundings(self, home: str) -> None:
        os.environ.update(HOME=home, TMPDIR=home)
        os.environ.pop("PYTHONPATH", None)
        tempfile.tempdir = None
        visible = tuple(root.readable())
        sys.path[:] = [path for path in sys.path if path.startswith(visible)]


def _become(user: int, *, keep: bool = False) -> None:
    """Become this user and the group of the same number, without capabilities unless ``keep``."""
    if keep:
        linux.process_option(linux.PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _limit(limits: Limits, used: int, *, others: int) -> None:
    """Set the limits of a process, which it cannot raise again.

    Args:
        others: processes and threads that are counted, but are not the episode's.
    """
    wanted: dict[int, int] = {
        resource.RLIMIT_AS: used + limits.memory_mb * 2**20,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_NICE: 0,
        resource.RLIMIT_RTPRIO: 0,
        resource.RLIMIT_STACK: _STACK,
    }
    if limits.files_mb is not None:
        wanted[resource.RLIMIT_FSIZE] = limits.files_mb * 2**20
    if limits.processes is not None:
        wanted[resource.RLIMIT_NPROC] = limits.processes + others
    for name, value in wanted.items():
        hard = resource.getrlimit(name)[1]
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (most, most))
    if limits.cpu_s is not None:
        soft = math.ceil(limits.cpu_s)
        resource.setrlimit(resource.RLIMIT_CPU, (soft, soft + 1))  # at the first a signal, then SIGKILL


def _threads_of_user() -> int:
    """Return how many processes and threads of this user there are on the machine."""
    user, count = str(os.getuid()), 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/status", errors="replace") as file:
            fields = dict(line.split(":", 1) for line in file if ":" in line)
            if fields["Uid"].split()[0] == user:
                count += int(fields["Threads"])
    return count
