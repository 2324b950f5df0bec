"""Calls of the Linux kernel that Python has no functions for. Each raises OSError."""

from __future__ import annotations

import ctypes
import os
import platform

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_ATTR_READ_ONLY = 1 | 2 | 4  # and no set-user-id programs, no devices

PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 4, 8, 38, 47
_AMBIENT_RAISE = 2
CAP_DAC_READ_SEARCH = 2
_CAPABILITY_VERSION = 0x20080522

MACHINE = platform.machine()
# The same on all machines from Linux 5 on; the first two are not.
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_MOUNT_SETATTR = 442

_libc = ctypes.CDLL(None, use_errno=True)


def syscall(name: str, number: int, *arguments: int | bytes | ctypes.Array | ctypes.Structure | None) -> int:
    """Call ``number``; structures and arrays are passed by address."""
    given: list[object] = [
        ctypes.byref(a)
        if isinstance(a, ctypes.Array | ctypes.Structure)
        else ctypes.c_long(a)
        if isinstance(a, int)
        else a
        for a in arguments
    ]
    return _checked(name, _libc.syscall(ctypes.c_long(number), *given))


def unshare(flags: int) -> None:
    _checked("unshare", _libc.unshare(flags))


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    source_, target_, kind_, options_ = texts
    result = _libc.mount(source_, target_, kind_, ctypes.c_ulong(flags), options_)
    _checked(f"mount {source or kind} on {target}", result)


def bind_read_only(source: str, target: str) -> None:
    """Show ``source``, with all that is mounted in it, at ``target``, read-only for all."""
    mount(source, target, None, MS_BIND | MS_REC)
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_READ_ONLY, 0, 0, 0)
    name = f"mount_setattr {target}"
    path = os.fsencode(target)
    syscall(name, _MOUNT_SETATTR, _AT_FDCWD, path, _AT_RECURSIVE, attributes, ctypes.sizeof(attributes))


def change_root(new: str) -> None:
    """Make the mount ``new`` the root of this mount namespace; no path leads to the old one."""
    old = f"{new}/.old"
    os.mkdir(old)
    syscall("pivot_root", _PIVOT_ROOT[MACHINE], os.fsencode(new), os.fsencode(old))
    _checked("umount", _libc.umount2(b"/.old", _MNT_DETACH))
    os.rmdir("/.old")
    mount(None, "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def process_option(option: int, *values: int) -> None:
    """Call prctl(2)."""
    given = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    _checked(f"prctl({option})", _libc.prctl(option, *given))


def set_capabilities(capabilities: int) -> None:
    """Have these capabilities and no others, also in programs that are executed."""
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
