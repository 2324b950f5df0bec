"""Confinement of an episode's processes, in independent layers.

    namespaces   separate processes, network without interfaces, and root with a writable directory
    user         as root: a separate user id that owns nothing outside
    Landlock     outside files are readable if Python needs them, never writable; no signals outside
    seccomp      refuses system calls that calculations do not need, including sockets
    limits       memory, CPU time, processes, files

`trial.find_isolation` tests which layers a machine allows.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import secrets
import site
import socket
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass

from grpo_dist.environments.sandbox import kernel

MOST_FILES = 8192  # maximum files and directories per episode
_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of an episode; None: the system's.

    Attributes:
        memory_mb: MiB that a process may add to its initial size; also the limit of all processes together.
        cpu_s: CPU seconds of all processes together.
        processes: processes and threads.
        files_mb: maximum size of a file, MiB; of all files if the episode's directory is a separate file
            system.
        output_kb: KiB of output kept per request; 0: output is discarded.
        reply_kb: maximum size of a reply, KiB.
    """

    memory_mb: int
    cpu_s: float | None = None
    processes: int | None = None
    files_mb: int | None = None
    output_kb: int = 0
    reply_kb: int = 16 * 1024


@dataclass(frozen=True, slots=True)
class TreeUsage:
    """CPU seconds, and bytes of anonymous and shared memory."""

    cpu_s: float = 0.0
    memory: int = 0

    @classmethod
    def measure(cls, pids: set[int], *, exact: bool) -> TreeUsage:
        """Measure these processes together. The working directory must be their /proc.

        Args:
            exact: count shared pages once, by reading every mapping; otherwise the sum may be too high.
        """
        cpu_s, memory = 0.0, 0
        for pid in pids:
            with contextlib.suppress(OSError, ValueError, IndexError):  # the process has ended
                cpu_s += _cpu_s(pid)
                memory += _memory_of(pid, exact=exact)
        return cls(cpu_s, memory)


def files_exceed(directory: str, megabytes: int) -> bool:
    """Return whether the files in ``directory`` exceed ``megabytes`` MiB or `MOST_FILES` in number."""
    size, count, waiting = 0, 0, [directory]
    while waiting:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                count += 1
                with contextlib.suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    else:
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
                if size > megabytes * 2**20 or count > MOST_FILES:
                    return True
    return False


def _cpu_s(pid: int) -> float:
    """Return CPU seconds of the process and the children it has waited for."""
    with open(f"{pid}/stat", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / _TICK


def _memory_of(pid: int, *, exact: bool) -> int:
    fields = ("Pss_Anon:", "Pss_Shmem:") if exact else ("RssAnon:", "RssShmem:")
    with open(f"{pid}/{'smaps_rollup' if exact else 'status'}") as file:
        lines = [line.split() for line in file]
    return sum(int(line[1]) * 1024 for line in lines if line and line[0] in fields)


# A root with Python's files, read-only, and the episode's directory; nothing else


HOME = "/tmp"  # the episode's directory in its root; the same in all runs
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/libx32", "/bin", "/sbin", "/etc/alternatives")
_FILES = ("/etc/ld.so.cache", "/etc/localtime")
_DEVICES = ("null", "zero", "full", "random", "urandom")
DEVICES = tuple(f"/dev/{name}" for name in _DEVICES)
_LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1"}


def readable_paths() -> list[str]:
    """Return the paths of Python, its packages, and the system's libraries.

    Excludes checkouts of editable installations and PYTHONPATH.
    """
    directories = [sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix]
    user_site = site.getusersitepackages() if site.ENABLE_USER_SITE else ""
    if user_site in sys.path:
        directories.append(user_site)
    paths = {path for path in (*_SYSTEM, *_FILES, *directories) if os.path.exists(path)}
    return sorted(paths | {os.path.realpath(path) for path in paths})


def build_root(directory: str, user: int, files_mb: int | None, *, own_proc: bool) -> None:
    """Build a new root on ``directory`` and enter it. Needs a separate mount namespace. Raises OSError."""
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", directory, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    for path in _outermost(readable_paths()):
        target = directory + path
        if os.path.islink(path):
            _make_parents(target)
            os.symlink(os.readlink(path), target)
            continue
        _make(target, like=path)
        kernel.bind_read_only(path, target)
    os.makedirs(f"{directory}/dev", 0o755)
    for name in _DEVICES:
        _make(f"{directory}/dev/{name}", like=f"/dev/{name}")
        kernel.mount(f"/dev/{name}", f"{directory}/dev/{name}", None, kernel.MS_BIND)
    for name, target in _LINKS.items():
        os.symlink(target, f"{directory}/dev/{name}")
    os.symlink(HOME, f"{directory}/dev/shm")
    os.makedirs(f"{directory}/etc", 0o755, exist_ok=True)
    for name, line in (("passwd", f"user:x:{user}:{user}::{HOME}:/bin/sh\n"), ("group", f"user:x:{user}:\n")):
        with open(f"{directory}/etc/{name}", "w") as file:
            file.write(line)
        os.chmod(f"{directory}/etc/{name}", 0o644)
    os.mkdir(f"{directory}/proc", 0o755)
    if own_proc:
        kernel.mount(
            "proc", f"{directory}/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
        )
    os.mkdir(directory + HOME)
    options = f"mode=700,uid={user},gid={user},nr_inodes={MOST_FILES}"
    if files_mb is not None:
        options += f",size={files_mb}m"
    kernel.mount("tmpfs", directory + HOME, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    kernel.change_root(directory)


def remove_tree(path: str) -> None:
    """Delete a directory tree of any depth and modes, without following links.

    Moves subdirectories to the top one by one, so paths stay short. No process may still use the tree.
    """
    with contextlib.suppress(FileNotFoundError):
        while entries := list(os.scandir(path)):
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                os.chmod(entry.path, 0o700)
                for below in list(os.scandir(entry.path)):
                    if below.is_dir(follow_symlinks=False):
                        os.chmod(below.path, 0o700)
                        os.rename(below.path, f"{path}/{secrets.token_hex(16)}")
                    else:
                        os.unlink(below.path)
                os.rmdir(entry.path)
        os.rmdir(path)


def _outermost(paths: Iterable[str]) -> list[str]:
    """Drop paths inside other paths. ``["/usr", "/usr/local"] -> ["/usr"]``"""
    outermost: list[str] = []
    for path in sorted(paths):
        if not any(path.startswith(f"{other}/") and not os.path.islink(other) for other in outermost):
            outermost.append(path)
    return outermost


def _make(target: str, *, like: str) -> None:
    """Create an empty directory or file as a mount point."""
    _make_parents(target)
    if os.path.isdir(like):
        os.makedirs(target, 0o755, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))


def _make_parents(target: str) -> None:
    os.makedirs(os.path.dirname(target), 0o755, exist_ok=True)


# Layers


_FLAGS = {
    "mount": kernel.CLONE_NEWNS,
    "pid": kernel.CLONE_NEWPID,
    "net": kernel.CLONE_NEWNET,
    "ipc": kernel.CLONE_NEWIPC,
    "uts": kernel.CLONE_NEWUTS,
}
SPACES = tuple(_FLAGS)
_OPEN_FILES = 256
_STACK = 8 * 2**20


@dataclass(frozen=True, slots=True)
class EpisodeSlot:
    """An episode's resources on the host.

    Attributes:
        number: unique among live episodes.
        path: the episode's directory.
    """

    number: int
    path: str


@dataclass(frozen=True, slots=True)
class Isolation:
    """The layers in use.

    Attributes:
        spaces: namespaces per episode, from `SPACES`.
        user_space: whether unprivileged creation of the namespaces needs a user namespace.
        own_proc: whether the new root has a /proc of the episode's processes; otherwise it has none.
        first_user: user id of slot 0; later slots count up. None: the current non-root user.
        landlock: Landlock ABI; 0: not used.
        seccomp: whether system calls are filtered.
        reads_all: whether to keep the right to read all files, limited by Landlock. Needed as root with
            separate user ids if only root can read Python's files.
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
        """Whether an episode's processes all end with the first one."""
        return "pid" in self.spaces

    def user(self, slot: EpisodeSlot) -> int:
        return os.getuid() if self.first_user is None else self.first_user + slot.number

    def home(self, slot: EpisodeSlot) -> str:
        """Return the episode's directory as seen by its processes."""
        return HOME if "mount" in self.spaces else slot.path

    def watched(self, slot: EpisodeSlot) -> str:
        """Return the directory whose size must be measured; "" if its file system limits it."""
        return "" if "mount" in self.spaces else slot.path

    def prepare(self, slot: EpisodeSlot) -> None:
        """Create the episode's directory. Called in the zygote."""
        os.mkdir(slot.path, 0o700)
        if self.first_user is not None:
            os.chown(slot.path, self.user(slot), self.user(slot))

    def remove(self, slot: EpisodeSlot) -> None:
        """Delete the episode's directory tree. Called in the zygote."""
        remove_tree(slot.path)

    def enter(self, slot: EpisodeSlot) -> None:
        """Enter new namespaces. Called in the keeper's parent, so that the keeper is their first process."""
        flags = sum(_FLAGS[name] for name in self.spaces)
        if not flags:
            return
        if not self.user_space:
            kernel.unshare(flags)
            return
        user = self.user(slot)
        if self.first_user is not None:
            _become(user)
        kernel.process_option(kernel.PR_SET_DUMPABLE, 1)  # else root would own the maps below
        group = os.getgid()
        kernel.unshare(kernel.CLONE_NEWUSER | flags)
        for name, line in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)

    def settle(self, slot: EpisodeSlot, limits: Limits) -> None:
        """Prepare the namespaces and change to the host's /proc. Called in the keeper."""
        os.chdir("/proc")
        os.umask(0o022)
        if "uts" in self.spaces:
            socket.sethostname("sandbox")
        if "mount" in self.spaces:
            build_root(slot.path, self.user(slot), limits.files_mb, own_proc=self.own_proc)
        kernel.process_option(kernel.PR_SET_DUMPABLE, 0)  # no other process can read its memory

    def confine(self, slot: EpisodeSlot, limits: Limits, used: int) -> None:
        """Drop all unneeded rights irrevocably. Called in the worker before it runs foreign code.

        Args:
            used: initial address space of the process, bytes.
        """
        home = self.home(slot)
        self._set_surroundings(home)
        if self.first_user is not None and not self.user_space:
            _become(self.user(slot), keep=self.reads_all)
            if self.reads_all:  # before Landlock, which opens the allowed directories
                kernel.set_capabilities(1 << kernel.CAP_DAC_READ_SEARCH)
        os.chdir(home)
        kernel.process_option(kernel.PR_SET_DUMPABLE, 1)
        _limit(limits, used, others=self._others())
        kernel.process_option(kernel.PR_SET_NO_NEW_PRIVS, 1)
        if self.landlock:
            readable = ["/"] if "mount" in self.spaces else readable_paths()
            kernel.restrict_by_landlock(self.landlock, readable, [home], DEVICES)
        if not self.reads_all:
            kernel.set_capabilities(0)
        if self.seccomp:
            alone = "pid" in self.spaces or self.landlock >= kernel.SIGNALS_FROM
            kernel.SyscallFilter(
                unix_sockets="mount" in self.spaces and "net" in self.spaces,
                attributes="mount" in self.spaces,
                truncation="mount" in self.spaces or self.landlock >= kernel.TRUNCATION_FROM,
                signals_to=None if alone else os.getpid(),
            ).install()

    def describe(self) -> list[str]:
        """Return a sentence per protected resource: its protection, or that it has none."""
        return [
            f"sandbox: processes: {self._processes()}",
            f"sandbox: network: {self._network()}",
            f"sandbox: files: {self._files()}",
            "sandbox: system calls: " + ("seccomp filter" if self.seccomp else "WARNING: all are allowed"),
        ]

    def _processes(self) -> str:
        users = f"user ids from {self.first_user}" if self.first_user is not None else ""
        users = users or (
            "" if self.user_space else "number limited only together with the user's other ones"
        )
        if "pid" in self.spaces:
            return ", ".join(filter(None, ("own namespace", users)))
        if self.landlock >= kernel.SIGNALS_FROM:
            return ", ".join(filter(None, ("others are seen, Landlock refuses signals to them", users)))
        if self.seccomp:
            return ", ".join(filter(None, ("others are seen, seccomp refuses signals to them", users)))
        if users and self.first_user is not None:
            return f"others are seen, {users}"
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
        users = "separate user ids" if self.first_user is not None else ""
        if "mount" in self.spaces:
            return "own root, writes only in the episode's directory" + (", Landlock" * bool(self.landlock))
        if self.landlock:
            start = "Landlock, writes only in the episode's directory"
            if self.landlock < kernel.TRUNCATION_FROM and not self.seccomp:
                start = "WARNING: Landlock, but code can empty any file that its user may write"
            return f"{start}, {users}" if users else start
        if users:
            return f"WARNING: {users}, so code can read and write what every user of this machine can"
        return "WARNING: code can read and write what this user can"

    def _others(self) -> int:
        """Return how many other processes and threads the kernel counts with an episode's."""
        if self.first_user is not None or self.user_space:
            return int(self.user_space)  # the keeper
        return _threads_of_user()

    def _set_surroundings(self, home: str) -> None:
        os.environ.update(HOME=home, TMPDIR=home)
        os.environ.pop("PYTHONPATH", None)
        tempfile.tempdir = None
        visible = tuple(readable_paths())
        sys.path[:] = [path for path in sys.path if path.startswith(visible)]


def _become(user: int, *, keep: bool = False) -> None:
    """Switch to this user and the group with the same number; drop capabilities unless ``keep``."""
    if keep:
        kernel.process_option(kernel.PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _limit(limits: Limits, used: int, *, others: int) -> None:
    """Set the limits of the process irrevocably.

    Args:
        others: counted processes and threads that are not the episode's.
    """
    limit_values: dict[int, int] = {
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
        limit_values[resource.RLIMIT_FSIZE] = limits.files_mb * 2**20
    if limits.processes is not None:
        limit_values[resource.RLIMIT_NPROC] = limits.processes + others
    for name, value in limit_values.items():
        hard = resource.getrlimit(name)[1]
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (most, most))
    if limits.cpu_s is not None:
        soft = math.ceil(limits.cpu_s)
        resource.setrlimit(resource.RLIMIT_CPU, (soft, soft + 1))  # soft limit: a signal; hard limit: SIGKILL


def _threads_of_user() -> int:
    """Return the number of this user's processes and threads on the machine."""
    user, count = str(os.getuid()), 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/status", errors="replace") as file:
            fields = dict(line.split(":", 1) for line in file if ":" in line)
            if fields["Uid"].split()[0] == user:
                count += int(fields["Threads"])
    return count
