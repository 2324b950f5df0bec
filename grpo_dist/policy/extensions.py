"""Kernels that DeepSpeed compiles at first use: one process at a time, and a killed one blocks no other.

torch marks a build with a file that its builder removes at the end. A killed builder leaves the file, and
every later process of that user waits for it forever. Here the mark is a lock that ends with its process.
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
    """Replaces torch's ``FileBaton``: every caller gets the lock in turn. Then ninja builds what is missing:
    all, part, or nothing.
    """

    def __init__(self, lock_file_path: str, wait_seconds: float = 0.1, warn_after_seconds: int = 0) -> None:
        """``warn_after_seconds`` is accepted for callers of a ``FileBaton``."""
        self._path, self._every_s = lock_file_path, wait_seconds
        self._descriptor = -1

    def try_acquire(self) -> bool:
        """Wait for the lock and return True. Raises TimeoutError when another process holds it too long."""
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
                        f"than {_DEADLINE_S:g} s; find the process that holds that file (fuser) and end it"
                    ) from None
                time.sleep(self._every_s)

    def release(self) -> None:
        """Release the lock. The file stays: only the lock counts."""
        os.close(self._descriptor)


def build_in_own_directory() -> None:
    """Build kernels under the `BuildLock`, in a directory of this project inside ``TORCH_EXTENSIONS_DIR``,
    else inside torch's own directory for kernels. Call it before DeepSpeed is imported.
    """
    # With the ninja of this very environment.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    if cpp_extension.FileBaton is BuildLock:
        return
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    # Environments have headers of their own, so each builds its own kernels.
    environment = hashlib.sha256(sys.prefix.encode()).hexdigest()[:8]
    kind = f"py{platform.python_version()}-torch{torch.__version__}-{platform.machine()}-{environment}"
    os.environ["TORCH_EXTENSIONS_DIR"] = str(root / "grpo-dist" / kind)
    cpp_extension.FileBaton = BuildLock  # type: ignore[misc,assignment]
