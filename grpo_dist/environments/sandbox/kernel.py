"""Linux system calls for confinement that Python has no functions for. Calls raise OSError.

Landlock: the kernel refuses all files, TCP ports and signals that are not listed.

Unlike namespaces it needs no privilege, and most kernels have it since 5.13 (ABI 1). Each ABI adds:
2 moves between directories, 3 truncation, 4 TCP, 5 ioctl of devices, 6 abstract Unix sockets and signals.

seccomp filter: refuses system calls that calculations never need, for a smaller attack surface.

It needs no privilege. It sees numbers only, never paths, so other layers protect files.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterable
from dataclasses import dataclass

# Calls


CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_ATTR_READ_ONLY = 1 | 2 | 4  # also no set-user-id programs and no devices

PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 4, 8, 38, 47
_AMBIENT_RAISE = 2
CAP_DAC_READ_SEARCH = 2
_CAPABILITY_VERSION = 0x20080522

MACHINE = platform.machine()
# The same on all machines since Linux 5, except for the first two.
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_MOUNT_SETATTR = 442

_libc = ctypes.CDLL(None, use_errno=True)


def syscall(name: str, number: int, *arguments: int | bytes | ctypes.Array | ctypes.Structure | None) -> int:
    """Make system call ``number``; structures and arrays are passed by address."""
    values: list[object] = [
        ctypes.byref(a)
        if isinstance(a, ctypes.Array | ctypes.Structure)
        else ctypes.c_long(a)
        if isinstance(a, int)
        else a
        for a in arguments
    ]
    return _checked(name, _libc.syscall(ctypes.c_long(number), *values))


def unshare(flags: int) -> None:
    _checked("unshare", _libc.unshare(flags))


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    source_, target_, kind_, options_ = texts
    result = _libc.mount(source_, target_, kind_, ctypes.c_ulong(flags), options_)
    _checked(f"mount {source or kind} on {target}", result)


def bind_read_only(source: str, target: str) -> None:
    """Bind ``source`` recursively to ``target``, read-only."""
    mount(source, target, None, MS_BIND | MS_REC)
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_READ_ONLY, 0, 0, 0)
    name = f"mount_setattr {target}"
    path = os.fsencode(target)
    syscall(name, _MOUNT_SETATTR, _AT_FDCWD, path, _AT_RECURSIVE, attributes, ctypes.sizeof(attributes))


def change_root(new: str) -> None:
    """Make the mount ``new`` the root of this mount namespace, without access to the old root."""
    old = f"{new}/.old"
    os.mkdir(old)
    syscall("pivot_root", _PIVOT_ROOT[MACHINE], os.fsencode(new), os.fsencode(old))
    _checked("umount", _libc.umount2(b"/.old", _MNT_DETACH))
    os.rmdir("/.old")
    mount(None, "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def process_option(option: int, *values: int) -> None:
    """Call prctl(2)."""
    arguments = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    _checked(f"prctl({option})", _libc.prctl(option, *arguments))


def set_capabilities(capabilities: int) -> None:
    """Keep only these capabilities, also in executed programs."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    low = capabilities & 0xFFFFFFFF
    data = (ctypes.c_uint32 * 6)(low, low, low, 0, 0, 0)  # effective, permitted, inheritable; then above 31
    syscall("capset", _CAPSET[MACHINE], header, data)
    for number in range(32):
        if low >> number & 1:
            process_option(_PR_CAP_AMBIENT, _AMBIENT_RAISE, number)


def _checked(name: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


# Landlock


_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_LANDLOCK_VERSION = 1  # flag of _CREATE_RULESET
_PATH_BENEATH = 1
_QUIET = 1  # flag of _RESTRICT_SELF from ABI 7: refusals are not logged
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE, _IOCTL_DEV = 1 << 14, 1 << 15
_ON_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_LANDLOCK_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}  # ABI: number of access rights to files
_TCP = 3  # bind and connect
_SCOPES = 3  # abstract Unix sockets and signals
TRUNCATION_FROM, SIGNALS_FROM = 3, 6  # the ABI from which truncation by path, and signals, are governed


def landlock_abi() -> int:
    """Return the ABI of this kernel; 0 without Landlock."""
    try:
        return syscall("landlock_create_ruleset", _CREATE_RULESET, None, 0, _LANDLOCK_VERSION)
    except OSError:
        return 0


def restrict_by_landlock(
    version: int, readable: Iterable[str], writable: Iterable[str], devices: Iterable[str]
) -> None:
    """Irrevocably allow only reading and executing in ``readable``, everything in ``writable``, and reading
    and writing ``devices``. Skips missing paths. Raises OSError.
    """
    rights = (1 << max(count for least, count in _LANDLOCK_RIGHTS.items() if least <= version)) - 1
    fields = [rights] + [_TCP] * (version >= 4) + [_SCOPES] * (version >= 6)
    attributes = (ctypes.c_uint64 * len(fields))(*fields)
    size = ctypes.sizeof(attributes)
    ruleset = syscall("landlock_create_ruleset", _CREATE_RULESET, attributes, size, 0)
    try:
        for paths, allowed in (
            (readable, _EXECUTE | _READ_FILE | _READ_DIR),
            (writable, rights),
            (devices, _READ_FILE | _WRITE_FILE),
        ):
            for path in paths:
                _allow_beneath(ruleset, path, allowed & rights)
        process_option(PR_SET_NO_NEW_PRIVS, 1)
        syscall("landlock_restrict_self", _RESTRICT_SELF, ruleset, _QUIET if version >= 7 else 0)
    finally:
        os.close(ruleset)


def _allow_beneath(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH)
    except FileNotFoundError:
        return
    try:
        if not os.path.isdir(path):
            rights &= _ON_FILES
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, descriptor), 12)
        syscall("landlock_add_rule", _ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
    finally:
        os.close(descriptor)


# seccomp


# name: number on x86_64, on aarch64; None: the call does not exist there.
_NUMBERS: dict[str, tuple[int | None, int | None]] = {
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "perf_event_open": (298, 241),
    # large and new kernel subsystems
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "fanotify_init": (300, 262),
    "lookup_dcookie": (212, 18),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # namespaces, mounts, roots
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    # the machine
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    "personality": (135, 92),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    # memory outside all processes, and so outside all limits
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    # make other system calls indirectly, unseen by the filter
    "seccomp": (317, 277),
}
_ATTRIBUTES: dict[str, tuple[int | None, int | None]] = {  # Landlock does not cover attributes of files
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
}
_TRUNCATION: dict[str, tuple[int | None, int | None]] = {"truncate": (76, 45)}
_SIGNALS: dict[str, tuple[int, int]] = {  # the first argument is a process
    "kill": (62, 129),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
}
_SETTINGS: dict[str, tuple[int, int]] = {  # the first argument is a process; 0: this one
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
}
_OTHER_PROCESSES: dict[str, tuple[int | None, int | None]] = {
    "tkill": (200, 130),
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
}
_CLONE, _CLONE3 = (56, 220), (435, 435)
_OPEN, _OPENAT, _OPENAT2 = (2, None), (257, 56), (437, 437)
_O_ACCMODE, _O_TRUNC = 3, 0x200
_SOCKET, _SOCKETPAIR = (41, 198), (53, 199)
_FCNTL, _IOCTL = (72, 25), (16, 29)
_NEW_NAMESPACES = 0x7E020000
_AF_UNIX, _SOCK_STREAM, _SOCK_TYPE = 1, 1, 0xF
_F_SETOWN, _F_SETOWN_EX = 8, 15
_TIOCSTI, _TIOCLINUX, _FIOSETOWN, _SIOCSPGRP = 0x5412, 0x541C, 0x8901, 0x8902

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000  # calls of the x32 ABI, under other numbers
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data


@dataclass(frozen=True, slots=True)
class SyscallFilter:
    """Options of a filter beyond the calls that are always refused.

    Attributes:
        unix_sockets: whether Unix sockets are allowed; other sockets never are.
        attributes: whether modes, owners and times of files may change.
        truncation: whether files may be truncated other than by writing to them.
        signals_to: the only process that may be signalled; None: any that the kernel permits.
    """

    unix_sockets: bool
    attributes: bool
    truncation: bool
    signals_to: int | None

    def install(self) -> None:
        """Filter the calls of this process and its children irrevocably. Raises OSError."""
        program = b"".join(struct.pack("=HBBI", *instruction) for instruction in self.instructions())
        buffer = ctypes.create_string_buffer(program, len(program))
        # struct sock_fprog: the number of instructions, then, aligned, their address
        header = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer)))
        process_option(PR_SET_NO_NEW_PRIVS, 1)
        process_option(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(header))

    def instructions(self) -> list[tuple[int, int, int, int]]:
        """Return the filter as BPF instructions: code, jump if true, jump if false, constant."""
        index = list(_AUDIT_ARCH).index(MACHINE)
        refused = dict(_NUMBERS)
        if not self.attributes:
            refused |= _ATTRIBUTES
        if not self.truncation:
            refused |= _TRUNCATION
        if self.signals_to is not None:
            refused |= _OTHER_PROCESSES
        program = [
            _load(_ARCHITECTURE),
            (_JUMP_EQUAL, 1, 0, _AUDIT_ARCH[MACHINE]),
            (_RETURN, 0, 0, _KILL),
            _load(_NUMBER),
        ]
        if MACHINE == "x86_64":
            program += [(_JUMP_AT_LEAST, 0, 1, _X32), _error(errno.ENOSYS)]
        for numbers in refused.values():
            if (number := numbers[index]) is not None:
                program += [(_JUMP_EQUAL, 0, 1, number), _error(errno.EPERM)]
        program += [(_JUMP_EQUAL, 0, 1, _CLONE3[index]), _error(errno.ENOSYS)]  # flags are unreadable
        program += _case(_CLONE[index], 0, [(_JUMP_ANY_BIT, 0, 1, _NEW_NAMESPACES), _error(errno.EPERM)])
        program += self._sockets(index)
        if not self.truncation:
            # Opening needs no right to write in the access modes 0 and 3.
            read_only = [(_AND, 0, 0, _O_ACCMODE | _O_TRUNC), *_none_of(_O_TRUNC, _O_ACCMODE | _O_TRUNC)]
            for numbers, argument in ((_OPEN, 1), (_OPENAT, 2)):
                if (number := numbers[index]) is not None:
                    program += _case(number, argument, read_only)
            program += [(_JUMP_EQUAL, 0, 1, _OPENAT2[index]), _error(errno.ENOSYS)]  # flags are unreadable
        program += _case(_IOCTL[index], 1, _none_of(_TIOCSTI, _TIOCLINUX))
        if self.signals_to is not None:
            only_itself = [(_JUMP_EQUAL, 1, 0, self.signals_to), _error(errno.EPERM)]
            for numbers in _SIGNALS.values():
                program += _case(numbers[index], 0, only_itself)
            for numbers in _SETTINGS.values():
                program += _case(numbers[index], 0, [(_JUMP_EQUAL, 2, 0, 0), *only_itself])
            program += _case(_FCNTL[index], 1, _none_of(_F_SETOWN, _F_SETOWN_EX))
            program += _case(_IOCTL[index], 1, _none_of(_FIOSETOWN, _SIOCSPGRP))
        return [*program, (_RETURN, 0, 0, _ALLOW)]

    def _sockets(self, index: int) -> list[tuple[int, int, int, int]]:
        family = [(_JUMP_EQUAL, 1, 0, _AF_UNIX), _error(errno.EACCES)]
        if self.unix_sockets:
            return _case(_SOCKET[index], 0, family) + _case(_SOCKETPAIR[index], 0, family)
        # A stream stays connected to its peer; a datagram socket could be redirected.
        stream = [(_AND, 0, 0, _SOCK_TYPE), (_JUMP_EQUAL, 1, 0, _SOCK_STREAM), _error(errno.EACCES)]
        return [
            (_JUMP_EQUAL, 0, 1, _SOCKET[index]),
            _error(errno.EACCES),
            *_case(_SOCKETPAIR[index], 0, family),
            *_case(_SOCKETPAIR[index], 1, stream),
        ]


def knows_system_calls() -> bool:
    """Return whether the table of system calls covers this machine."""
    return MACHINE in _AUDIT_ARCH


def _load(offset: int) -> tuple[int, int, int, int]:
    return (_LOAD, 0, 0, offset)


def _error(number: int) -> tuple[int, int, int, int]:
    return (_RETURN, 0, 0, _ERROR | number)


def _none_of(*values: int) -> list[tuple[int, int, int, int]]:
    return [part for value in values for part in ((_JUMP_EQUAL, 0, 1, value), _error(errno.EPERM))]


def _case(
    number: int, argument: int, test: list[tuple[int, int, int, int]]
) -> list[tuple[int, int, int, int]]:
    """Return ``test`` of an argument's lower half, for this call only. The accumulator holds the call number
    before and after.
    """
    inside = [_load(_ARGUMENTS + 8 * argument), *test, _load(_NUMBER)]
    return [(_JUMP_EQUAL, 0, len(inside), number), *inside]
