"""Kernels are compiled at first use, by processes that may be killed meanwhile."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_dist.config import PolicyConfig
from grpo_dist.errors import UserError
from grpo_dist.policy.extensions import build_kernels_here, list_kernels, unbuilt
from grpo_dist.runtime import processes
from tests.support.patience import HANG_S

BUILD = """
import ctypes, sys
from grpo_dist.policy.extensions import build_in_own_directory
build_in_own_directory()
from torch.utils.cpp_extension import load
library = load(name="answer", sources=[sys.argv[1]], is_python_module=False, verbose=False)
print(ctypes.CDLL(library).answer(), library)
"""

HELD_S = 6.0  # nothing ends within it, however fast the machine

DIE = """
import os, sys, time
from grpo_dist.policy.extensions import BuildLock
assert BuildLock(sys.argv[1]).try_acquire()
print("held", flush=True)
time.sleep(600)
"""


def build(directory: Path) -> subprocess.Popen:
    (directory / "answer.cpp").write_text('extern "C" int answer() { return 42; }')
    return subprocess.Popen(
        [sys.executable, "-c", BUILD, str(directory / "answer.cpp")],
        env=os.environ | {"TORCH_EXTENSIONS_DIR": str(directory)},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_process_killed_during_a_build_delays_no_other(tmp_path):
    first, second = build(tmp_path), build(tmp_path)  # concurrently: one waits for the other
    found = [process.communicate(timeout=HANG_S)[0].split() for process in (first, second)]
    library = Path(found[0][1])
    assert found == [["42", str(library)]] * 2 and library.is_relative_to(tmp_path / "grpo-dist")
    # Leftovers of a kill: half of the library, and torch's file that marks the build.
    library.write_bytes(library.read_bytes()[:1000])
    library.with_name(".ninja_log").unlink()
    lock = library.with_name("lock")
    assert lock.exists()
    holder = subprocess.Popen([sys.executable, "-c", DIE, str(lock)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    waiting = build(tmp_path)
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(HELD_S)
    holder.kill()
    holder.wait(HANG_S)
    assert waiting.communicate(timeout=HANG_S)[0].split()[0] == "42"


def test_a_kernel_that_is_never_built_is_reported(tmp_path, monkeypatch):
    from grpo_dist.policy import extensions

    monkeypatch.setattr(extensions, "_DEADLINE_S", 0.1)
    path = str(tmp_path / "lock")
    holder = extensions.BuildLock(path)
    assert holder.try_acquire()
    with pytest.raises(TimeoutError, match="another process has been building"):
        extensions.BuildLock(path, wait_seconds=0.05).try_acquire()
    holder.release()
    assert extensions.BuildLock(path).try_acquire()


def offloaded(optimizer="none", parameters="none", **zero):
    offload = {"optimizer": optimizer, "parameters": parameters, "nvme_path": "/tmp"}
    return PolicyConfig(zero_stage=3, offload=offload, deepspeed={"zero_optimization": zero})


def test_a_configuration_names_every_kernel_that_its_ranks_load(monkeypatch):
    assert list_kernels(offloaded(), "cuda") == []
    assert list_kernels(offloaded(), "cpu") == ["ShareMemCommBuilder"]
    assert list_kernels(offloaded("cpu"), "cuda") == ["CPUAdamBuilder"]
    assert list_kernels(offloaded("nvme"), "cuda") == ["CPUAdamBuilder", "AsyncIOBuilder"]
    assert list_kernels(offloaded(parameters="nvme"), "cuda") == ["AsyncIOBuilder"]
    assert list_kernels(offloaded(offload_optimizer={"device": "cpu"}), "cuda") == ["CPUAdamBuilder"]
    assert list_kernels(offloaded(zero_quantized_weights=True), "cuda") == ["QuantizerBuilder"]
    monkeypatch.setenv("DS_PIN_MEMORY_BACKEND", "native")
    assert list_kernels(offloaded(), "cuda") == ["PinMemoryBuilder"]


def test_a_kernel_that_cannot_be_built_is_refused_with_the_compilers_output(tmp_path, monkeypatch):
    compiler = tmp_path / "c++"
    failing = "echo 'fatal error: Python.h: No such file or directory'; exit 1"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *" -c "*) {failing};; esac\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with pytest.raises(UserError) as refused:
        asyncio.run(build_kernels_here(["CPUAdamBuilder"]))
    said = str(refused.value)
    assert said.startswith("DeepSpeed's kernel cpu_adam cannot be built for Python ")
    assert "install the headers of Python (python3-dev)" in said
    assert "fatal error: Python.h: No such file or directory" in said.partition("The compiler says:")[2]


@pytest.mark.slow
def test_a_kernel_is_built_once_and_found_by_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    builders = ["ShareMemCommBuilder"]
    assert unbuilt(builders) == builders
    asyncio.run(build_kernels_here(builders))
    assert unbuilt(builders) == []
    (library,) = tmp_path.rglob("deepspeed_shm_comm.so")
    built = library.stat().st_mtime_ns
    library.with_name(".ninja_log").unlink()  # to ninja, another environment's build is as good as none
    asyncio.run(build_kernels_here(builders))
    assert library.stat().st_mtime_ns == built
    library.write_bytes(b"damaged")
    asyncio.run(build_kernels_here(builders))
    assert library.stat().st_size > 1000 and unbuilt(builders) == []


def test_a_build_that_is_killed_is_named(monkeypatch):
    monkeypatch.setattr(processes, "child_command", lambda *_: ["sh", "-c", "kill -9 $$"])
    with pytest.raises(UserError, match=r"kernels cpu_adam are not built.*status -9.*memory"):
        asyncio.run(build_kernels_here(["CPUAdamBuilder"]))
