"""Guarantees: problems and scores of reasoning-gym, unmodified, as a data source and a reward."""

import os
import subprocess

import pytest

from tests.support.documents import ROOT
from tests.support.other_packages import interpreter_with
from tests.support.patience import HANG_S

TESTS = "tests/data/reasoning_gym_problems.py"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(2 * HANG_S)
def test_the_source_and_its_scorer_hold_in_an_interpreter_with_the_package() -> None:
    python = interpreter_with("reasoning_gym")
    # Without the variables of this session's workers.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [python, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", TESTS]
    done = subprocess.run(
        command, cwd=ROOT, env=environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and " skipped" not in done.stdout
