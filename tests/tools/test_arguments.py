"""The command line as a whole."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import HANG_S

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.machine
@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), (["check", "none.yaml"], 2)])
def test_a_command_whose_output_nobody_reads_ends_without_a_traceback(arguments, code):
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "wb") as unread:
        ended = subprocess.run(
            [sys.executable, "-m", "grpo_dist.cli", *arguments],
            cwd=ROOT, stdout=unread, stderr=subprocess.PIPE, text=True, timeout=HANG_S,
        )  # fmt: skip
    assert ended.returncode == code
    assert "Traceback" not in ended.stderr and "Exception ignored" not in ended.stderr
