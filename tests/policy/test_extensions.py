"""Kernels are compiled at first use, by processes that may be killed meanwhile."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
