"""`make test` runs both halves and fails if either fails; `make evidence` runs all cases."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Logs its arguments and returns the next of the codes.
_STUB = """#!/bin/sh
echo "seed=$GRPO_DIST_TEST_SEED $*" >> "$LOG"
code=${CODES%% *}; [ "$(wc -l < "$LOG")" = 1 ] || code=${CODES##* }
exit "$code"
"""


@pytest.fixture
def made(tmp_path):
    """Run a target with a stand-in for Python that returns ``codes``; return the exit code and the calls."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    (tmp_path / "python").write_text(_STUB)
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "ready").touch()

    def run(target, codes, *arguments):
        log = tmp_path / "calls"
        log.unlink(missing_ok=True)
        command = ["make", "-C", ROOT, target, f"BIN={tmp_path}", f"READY={tmp_path / 'ready'}", *arguments]
        # `make test ARGS=...` passes both on to this test.
        inherited = {n: value for n, value in os.environ.items() if n != "ARGS" and not n.startswith("MAKE")}
        environment = inherited | {"CODES": codes, "LOG": str(log)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        return done.returncode, log.read_text().splitlines()

    return run


@pytest.mark.parametrize(
    ("codes", "fails"),
    [
        *((codes, False) for codes in ("0 0", "0 5", "5 0")),
        *((codes, True) for codes in ("1 0", "0 1", "2 5", "5 5")),
    ],
)
def test_both_halves_run_and_the_exit_code_reports_a_failure_of_either(made, codes, fails):
    """pytest returns 5 when no test is selected, which one half may do."""
    code, calls = made("test", codes, "ARGS=-k loss")
    assert (code != 0) == fails
    assert len(calls) == 2 and all(call.endswith("-k loss") for call in calls)


def test_evidence_has_every_case_that_the_suite_draws_from(made):
    _, (marked,) = made("evidence", "0 0")
    assert marked.startswith("seed=all ") and marked.endswith("-s -m evidence tests")


def test_the_halves_of_the_suite_have_every_test_once(made):
    _, (first, second) = made("test", "0 0")
    assert "-n 3 --dist loadfile --no-loadscope-reorder -m not evidence and not machine" in first
    assert "-n 2 --dist loadfile --no-loadscope-reorder -m machine and not evidence" in second
