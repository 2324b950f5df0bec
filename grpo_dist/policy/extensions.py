"""Kernels that DeepSpeed compiles at first use: one process at a time, and never waiting for one that died.

torch marks a build by a file that its builder removes at the end. A builder that was killed leaves it, and
every later process of that user waits for it for ever. Here the mark is a lock that ends with its process.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import sys
import time
from pathlib import Path

import torch
from torch.utils import cpp_extension

_DEADLINE_S = 540.0  # of one build by another process; less than the start of a run has by default


class BuildLock:
    """In place of torch's ``FileBaton``: whoever asks gets it, when nobody else has it. Then ninja sees what
    is left to be built: all, part, or nothing.
    """

    def __init__(self, lock_file_path: str, wait_seconds: float = 0.1, warn_after_seconds: int = 0) -> None:
        """``warn_after_seconds`` is only there for callers of a ``FileBaton``."""
        self._path, self._every_s = lock_file_path, wait_seconds
        self._descriptor = -1

    def try_acquire(self) -> bool:
        """True, once it is had. Raises TimeoutError when another process has it for too long."""
        self._descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        until = time.monotonic() + _DEADLINE_S
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() > until:
                    os.close(self._descriptor)
                    raise TimeoutError(
                        f"{self._path}: another process has been building this kernel of DeepSpeed for more "
                        f"than {_DEADLINE_S:g} s; see what holds that file open (fuser), and end it"
                    ) from None
                time.sleep(self._every_s)

    def release(self) -> None:
        """The file stays: it is the lock that counts."""
        os.close(self._descriptor)


def build_in_own_directory() -> None:
    """To be called before DeepSpeed is imported. Where all who build take the `BuildLock`:
    ``TORCH_EXTENSIONS_DIR``, else torch's own place for kernels, and there a directory of this project.
    """
    # With the ninja of this very environment.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    if cpp_extension.FileBaton is BuildLock:
        return
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    # What is built for one of them is built anew for another, whose headers are elsewhere.
    environment = hashlib.sha256(sys.prefix.encode()).hexdigest()[:8]
    kind = f"py{platform.python_version()}-torch{torch.__version__}-{platform.machine()}-{environment}"
    os.environ["TORCH_EXTENSIONS_DIR"] = str(root / "grpo-dist" / kind)
    cpp_extension.FileBaton = BuildLock  # type: ignore[misc,assignment]
