"""Landlock: the kernel refuses this process every file, TCP port and signal that is not listed.

Unlike namespaces it needs no privilege, and it is in most kernels since 5.13 (ABI 1). What each ABI adds:
2 moves between directories, 3 truncation, 4 TCP, 5 ioctl of devices, 6 abstract Unix sockets and signals.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

from grpo_dist.environments.sandbox.linux import PR_SET_NO_NEW_PRIVS, process_option, syscall

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION = 1  # flag of _CREATE_RULESET
_PATH_BENEATH = 1
_QUIET = 1  # flag of _RESTRICT_SELF from ABI 7: refusals are not logged
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE, _IOCTL_DEV = 1 << 14, 1 << 15
_ON_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}  # ABI: number of access rights to files
_TCP = 3  # bind and connect
_SCOPES = 3  # abstract Unix sockets and signals
SIGNALS_FROM = 6  # the ABI from which signals are scoped


def abi() -> int:
    """Return the ABI of this kernel; 0 without Landlock."""
    try:
        return syscall("landlock_create_ruleset", _CREATE_RULESET, None, 0, _VERSION)
    except OSError:
        return 0


def restrict(version: int, readable: Iterable[str], writable: Iterable[str], devices: Iterable[str]) -> None:
    """Refuse this process, for good, all but: reading and executing beneath ``readable``, everything beneath
    ``writable``, reading and writing ``devices``. Paths that do not exist are skipped. Raises OSError.
    """
    rights = (1 << max(count for least, count in _RIGHTS.items() if least <= version)) - 1
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
                _allow(ruleset, path, allowed & rights)
        process_option(PR_SET_NO_NEW_PRIVS, 1)
        syscall("landlock_restrict_self", _RESTRICT_SELF, ruleset, _QUIET if version >= 7 else 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
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
