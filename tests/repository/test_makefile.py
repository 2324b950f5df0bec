"""What the targets of the Makefile run; `test_halves.py` has the halves of `make test`."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Logs its arguments and returns the code.
_STUB = """#!/bin/sh
echo "seed=$GRPO_DIST_TEST_SEED $*" >> "$LOG"
exit "$CODE"
"""


@pytest.fixture
def made(tmp_path):
    """Run a target with a stand-in for Python that returns ``code``; return the exit code and the calls."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    (tmp_path / "python").write_text(_STUB)
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "ready").touch()

    def run(target, code, *arguments):
        log = tmp_path / "calls"
        log.unlink(missing_ok=True)
        command = [
            "make",
            "-C",
            ROOT,
            target,
            f"BIN={tmp_path}",
            f"READY={tmp_path / 'ready'}",
            f"PACKAGES={tmp_path / 'ready'}",
            *arguments,
        ]
        # `make test ARGS=...` passes both on to this test.
        inherited = {n: value for n, value in os.environ.items() if n != "ARGS" and not n.startswith("MAKE")}
        environment = inherited | {"CODE": code, "LOG": str(log)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        return done.returncode, log.read_text().splitlines()

    return run


@pytest.mark.parametrize("code", ["0", "1"])
def test_the_suite_is_both_halves_and_fails_as_they_do(made, code):
    failed, (call,) = made("test", code, "ARGS=-k loss")
    assert (failed != 0) == (code != "0")
    assert call.endswith(" -m tests.support.halves -k loss")


def test_evidence_has_every_case_that_the_suite_draws_from(made):
    _, (marked,) = made("evidence", "0")
    assert marked.startswith("seed=all ") and marked.endswith("-s -m evidence tests")
