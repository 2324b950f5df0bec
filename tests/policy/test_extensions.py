"""Kernels are compiled at first use, by processes that may be killed during the build."""

import asyncio
import ctypes
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from torch.utils.cpp_extension import load

from grpo_dist.config import OffloadConfig, PolicyConfig
from grpo_dist.errors import UserError
from grpo_dist.policy.deepspeed_config import check_offload
from grpo_dist.policy.extensions import (
    BuildLock,
    _why_not_built,
    begin_kernels,
    build_in_own_directory,
    build_kernels_here,
    kernel_directory,
    list_kernels,
    unbuilt,
)
from grpo_dist.runtime import processes
from tests.support.patience import HANG_S

HELD_S = 4.0  # no build finishes within it on any machine
FORK = multiprocessing.get_context("fork")  # forks inherit the loaded torch


def build(directory: Path) -> tuple[BaseProcess, Connection]:
    """Start a process that builds a library and sends its path."""
    (directory / "answer.cpp").write_text('extern "C" int answer() { return 42; }')
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_build, args=(directory, sender))
    process.start()
    sender.close()
    return process, receiver


def _build(directory, sender):
    os.environ["TORCH_EXTENSIONS_DIR"] = str(directory)
    build_in_own_directory()
    sources = [str(directory / "answer.cpp")]
    library = load(name="answer", sources=sources, is_python_module=False, verbose=False)
    sender.send((ctypes.CDLL(library).answer(), library))


def _hold(lock, sender):
    assert BuildLock(lock).try_acquire()
    sender.send("held")
    time.sleep(HANG_S)


def answer(receiver):
    assert receiver.poll(HANG_S)
    return receiver.recv()


@pytest.mark.slow
def test_a_process_killed_during_a_build_delays_no_other(tmp_path):
    first, second = build(tmp_path), build(tmp_path)  # concurrently: one waits for the other
    answers = [answer(receiver) for _, receiver in (first, second)]
    library = Path(answers[0][1])
    assert answers == [(42, str(library))] * 2 and library.is_relative_to(tmp_path / "grpo-dist")
    # Leftovers of a kill: half of the library, and torch's file that marks the build.
    library.write_bytes(library.read_bytes()[:1000])
    library.with_name(".ninja_log").unlink()
    lock = library.with_name("lock")
    assert lock.exists()
    receiver, sender = FORK.Pipe(duplex=False)
    holder = FORK.Process(target=_hold, args=(str(lock), sender))
    holder.start()
    assert answer(receiver) == "held"
    waiting, last = build(tmp_path)
    assert not last.poll(HELD_S) and waiting.is_alive()
    holder.kill()
    assert answer(last)[0] == 42
    for process in (first[0], second[0], holder, waiting):
        process.join(HANG_S)
        assert process.exitcode is not None


def test_a_kernel_that_is_never_built_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_dist.policy.extensions._DEADLINE_S", 0.1)
    path = str(tmp_path / "lock")
    holder = BuildLock(path)
    assert holder.try_acquire()
    with pytest.raises(TimeoutError, match="another process has been building"):
        BuildLock(path, wait_seconds=0.05).try_acquire()
    holder.release()
    assert BuildLock(path).try_acquire()


def offloaded(optimizer="none", parameters="none", **zero):
    offload = {"optimizer": optimizer, "parameters": parameters, "nvme_path": "/tmp"}
    return PolicyConfig(zero_stage=3, offload=offload, deepspeed={"zero_optimization": zero})


def test_a_configuration_names_every_kernel_that_its_ranks_load(monkeypatch):
    assert list_kernels(offloaded(), "cuda") == []
    assert list_kernels(offloaded(), "cpu") == ["ShareMemCommBuilder"]
    assert list_kernels(offloaded("cpu"), "cuda") == ["CPUAdamBuilder"]
    assert list_kernels(offloaded("nvme"), "cuda") == ["CPUAdamBuilder", "AsyncIOBuilder"]
    assert list_kernels(offloaded(parameters="nvme"), "cuda") == ["AsyncIOBuilder"]
    assert list_kernels(offloaded(zero_quantized_weights=True), "cuda") == ["QuantizerBuilder"]
    monkeypatch.setenv("DS_PIN_MEMORY_BACKEND", "native")
    assert list_kernels(offloaded(), "cuda") == ["PinMemoryBuilder"]


def test_offload_needs_compiler_and_libaio_only_where_its_kernels_must_be_built(tmp_path, monkeypatch):
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder import AsyncIOBuilder

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "kernels"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda self: False)
    offload = OffloadConfig(optimizer="nvme", parameters="nvme", nvme_path=str(tmp_path))
    policy = PolicyConfig(zero_stage=3, offload=offload)
    with pytest.raises(ValueError, match=r"no C\+\+ compiler 'no-such-compiler' here; install g\+\+"):
        check_offload(policy)
    with monkeypatch.context() as installed:
        installed.setitem(installed_ops, "cpu_adam", True)
        with pytest.raises(ValueError, match=r"`policy\.offload` = nvme.*install libaio-dev.*or use cpu"):
            check_offload(policy)
    for name in ("cpu_adam", "async_io"):
        (kernel_directory() / name).mkdir(parents=True)
        (kernel_directory() / name / "built").touch()
    check_offload(policy)


@pytest.mark.parametrize(
    ("output", "missing"),
    [
        ("FAILED: cpu_adam.o\n/bin/sh: 1: c++: not found\nninja: build stopped: subcommand failed.",
         "a C++ compiler (g++), and start again"),
        ("Unable to JIT load the cpu_adam op due to ninja not being installed.", "ninja (pip install ninja)"),
        ("Unable to JIT load the async_io op due to it not being compatible due to hardware/software issue.",
         "libaio-dev (Debian, Ubuntu) or libaio-devel"),
    ],
)  # fmt: skip
def test_a_failed_build_names_what_to_install(output, missing):
    assert f"; install {missing}" in _why_not_built("a_kernel", RuntimeError(output))


@pytest.mark.slow
def test_a_kernel_that_cannot_be_built_is_refused_with_the_compilers_output(tmp_path, monkeypatch):
    compiler = tmp_path / "c++"
    failing = "echo 'fatal error: Python.h: No such file or directory'; exit 1"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *" -c "*) {failing};; esac\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with pytest.raises(UserError) as refused:
        asyncio.run(build_kernels_here(["CPUAdamBuilder"]))
    message = str(refused.value)
    assert message.startswith("DeepSpeed's kernel cpu_adam cannot be built for Python ")
    assert "install the headers of Python (python3-dev)" in message
    assert "fatal error: Python.h: No such file or directory" in message.partition("The compiler says:")[2]


@pytest.mark.slow
def test_a_kernel_is_built_once_and_found_by_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    builders = ["ShareMemCommBuilder"]
    assert unbuilt(builders) == builders
    begin_kernels(offloaded(), "cpu")  # the next waits for it
    asyncio.run(build_kernels_here(builders))
    assert unbuilt(builders) == []
    (library,) = tmp_path.rglob("deepspeed_shm_comm.so")
    built = library.stat().st_mtime_ns
    library.with_name(".ninja_log").unlink()  # ninja ignores builds of another environment
    asyncio.run(build_kernels_here(builders))
    assert library.stat().st_mtime_ns == built
    library.write_bytes(b"damaged")
    asyncio.run(build_kernels_here(builders))
    assert library.stat().st_size > 1000 and unbuilt(builders) == []


def test_a_build_that_is_killed_is_named(monkeypatch):
    monkeypatch.setattr(processes, "child_command", lambda *_: ["sh", "-c", "kill -9 $$"])
    with pytest.raises(UserError, match=r"kernels cpu_adam are not built.*status -9.*memory"):
        asyncio.run(build_kernels_here(["CPUAdamBuilder"]))
