"""Builds DeepSpeed's kernels once, in one process; a killed build blocks no other process.

torch marks a build with a file that its builder removes at the end. A killed builder leaves the file, and
every later process of that user waits for it forever. Here the mark is a lock that ends with its process.
"""

from __future__ import annotations

import fcntl
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils import cpp_extension

from grpo_dist.config import PolicyConfig
from grpo_dist.errors import UserError
from grpo_dist.runtime.hardware import processor_digest
from grpo_dist.runtime.processes import child_command, run_child

_DEADLINE_S = 3600.0  # per build by another process: a busy machine takes minutes for one file
_NICENESS = 5  # of a background build
_REFUSED = "REFUSED: "  # prefix of the message of a failed build
_OUTPUT = 4000  # characters of a compiler's output, from its end
_NAMES = {
    "CPUAdamBuilder": "cpu_adam", "AsyncIOBuilder": "async_io", "QuantizerBuilder": "quantizer",
    "PinMemoryBuilder": "pin_memory", "ShareMemCommBuilder": "deepspeed_shm_comm",
}  # fmt: skip
LIBAIO = (
    "libaio-dev (Debian, Ubuntu) or libaio-devel (Fedora, Red Hat), or name where libaio is in CFLAGS and "
    "LDFLAGS, or use cpu instead of nvme in `policy.offload`"
)
# Words in the output of a failed build, and the missing dependency.
_MISSING = {
    "Python.h": "the headers of Python (python3-dev)",
    # DeepSpeed says no more without libaio and its header.
    "async_io op due to it not being compatible": LIBAIO,
    "ninja not being installed": "ninja (pip install ninja)",
    "CUDA_HOME": "the CUDA toolkit, and set CUDA_HOME",
    "nvcc": "the CUDA toolkit, and set CUDA_HOME",
}  # fmt: skip

_background_builds: list[psutil.Popen] = []  # Python warns about a running process without a reference


class BuildLock:
    """Replaces torch's ``FileBaton``: callers get the lock one after the other. Then ninja builds what is
    missing: all, part, or nothing.
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
    """Build kernels under the `BuildLock`, in this project's directory inside ``TORCH_EXTENSIONS_DIR``, else
    inside torch's directory for kernels. Call it before DeepSpeed is imported.
    """
    # Use this environment's ninja.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    if cpp_extension.FileBaton is BuildLock:
        return
    os.environ["TORCH_EXTENSIONS_DIR"] = str(kernel_directory())
    cpp_extension.FileBaton = BuildLock  # type: ignore[misc,assignment]


def kernel_directory() -> Path:
    """Return the directory of the kernels of these versions on this processor, for every environment."""
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    if cpp_extension.FileBaton is BuildLock:  # `build_in_own_directory` has set it
        return root
    versions = f"py{platform.python_version()}-torch{torch.__version__}-deepspeed{version('deepspeed')}"
    # They are compiled for the processor (-march=native).
    return root / "grpo-dist" / f"{versions}-{platform.machine()}-{processor_digest()}"


def list_kernels(policy: PolicyConfig, device: str) -> list[str]:
    """Return the builders of DeepSpeed's kernels that the ranks of ``policy`` load on ``device``.

    DeepSpeed's fused Adam is not among them: the optimiser on GPUs is torch's.
    """
    where = policy.offload
    zero = policy.deepspeed.get("zero_optimization", {})
    needs = {
        "ShareMemCommBuilder": device == "cpu",
        "CPUAdamBuilder": where.optimizer != "none",
        "AsyncIOBuilder": "nvme" in (where.optimizer, where.parameters),
        "QuantizerBuilder": any(value for key, value in zero.items() if key.startswith("zero_quantized_")),
        "PinMemoryBuilder": os.environ.get("DS_PIN_MEMORY_BACKEND") == "native",
    }
    return [name for name, is_needed in needs.items() if is_needed]


def unbuilt(builders: Sequence[str]) -> list[str]:
    """Return the ``builders`` whose kernels this machine does not have yet."""
    return [name for name in builders if not _mark(name).exists()]


def _mark(builder: str) -> Path:
    """Return the file that marks a kernel as built and loaded."""
    return kernel_directory() / _NAMES[builder] / "built"


def _load_built(builder: Any) -> None:
    """Make DeepSpeed's ``builder`` use the existing library. Raises ImportError for a damaged one.

    DeepSpeed calls ninja, which rebuilds what another environment built: the headers have other paths.
    """
    library = kernel_directory() / builder.name / f"{builder.name}.so"
    spec = spec_from_file_location(builder.name, library)
    assert spec is not None and spec.loader is not None, library
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    builder._loaded_ops[builder.name] = module


def build_kernels(builders: Sequence[str]) -> None:
    """Build and load kernels, or wait for the process that builds them. Call `build_in_own_directory` first.

    Raises UserError with the compiler's output and what to install.
    """
    from deepspeed.accelerator import get_accelerator  # heavy, and only ranks and builds need it

    for name in builders:
        builder = get_accelerator().create_op_builder(name)
        if builder is None or (name == "ShareMemCommBuilder" and not builder.is_compatible(verbose=False)):
            continue  # DeepSpeed does without it
        mark = _mark(name)
        # GPU code fits only the GPU type it was built on: ninja compares.
        if mark.exists() and name != "QuantizerBuilder":
            try:
                _load_built(builder)
                continue
            except ImportError:  # damaged: rebuild
                mark.unlink(missing_ok=True)
        try:
            builder.load(verbose=False)
        except Exception as error:
            raise UserError(_why_not_built(_NAMES[name], error)) from error
        mark.parent.mkdir(parents=True, exist_ok=True)  # DeepSpeed may have been installed with its kernels
        mark.touch()


def _why_not_built(kernel: str, error: Exception) -> str:
    output = str(error).strip()
    missing = next((what for word, what in _MISSING.items() if word in output), "a C++ compiler (g++)")
    return (
        f"DeepSpeed's kernel {kernel} cannot be built for Python {platform.python_version()} and torch "
        f"{torch.__version__} in {kernel_directory()}; install {missing}, and start again. "
        "The compiler says:\n"
        f"{output[-_OUTPUT:]}"
    )


def begin_kernels(policy: PolicyConfig, device: str) -> None:
    """Start building the missing kernels of ``policy``'s ranks, at a low priority: two compilers would take
    half a core from the thread of a cold start. `build_kernels_here` waits for the build and reports what
    cannot be built. The process may outlive a refused run by a minute or two: each kernel is compiled once
    per machine, and the next start uses it.
    """
    if missing := unbuilt(list_kernels(policy, device)):
        devnull = subprocess.DEVNULL
        command = child_command("grpo_dist.policy.extensions", *missing)
        _background_builds.append(psutil.Popen(command, stdin=devnull, stdout=devnull, stderr=devnull))
        _background_builds[-1].nice(_NICENESS)


async def build_kernels_here(builders: Sequence[str]) -> None:
    """Build the missing kernels of ``builders`` in a child process before ranks start: a build may take
    longer than the start of an actor. Raises UserError as `build_kernels`, TimeoutError after an hour.
    """
    status, _, errors = await run_child("grpo_dist.policy.extensions", *builders, deadline_s=_DEADLINE_S)
    if status:
        refusal = errors.rpartition(_REFUSED)[2]
        # A killed process, e.g. out of memory, has written nothing.
        raise UserError(
            refusal.strip()[-2 * _OUTPUT :]
            or f"DeepSpeed's kernels {', '.join(_NAMES[name] for name in builders)} are not built: the "
            f"process that builds them ended with status {status}; a status of -9 usually means out of "
            "memory: free some, and start again"
        )


def main() -> None:
    """Build the kernels of the builders in sys.argv. Writes the reason of a failure to standard error."""
    build_in_own_directory()
    try:
        build_kernels(sys.argv[1:])
    except UserError as error:
        print(f"{_REFUSED}{error}", file=sys.stderr)
        sys.exit(1)
