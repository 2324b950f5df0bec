"""Guarantee: freed memory returns to the system."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import HANG_S

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import numpy as np
from grpo_dist.runtime.memory import return_freed_memory

def resident():  # MiB, without files
    (line,) = (line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024

arrays = [np.ones(2000) for _ in range(20_000)]  # 16 kB each
kept, arrays = arrays[::500], None
before = resident()
return_freed_memory()
print(before - resident())
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked")
def test_memory_between_what_is_kept_returns_to_the_system():
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S
    )
    assert float(done.stdout) > 200, done.stderr  # MiB, of 305 freed
