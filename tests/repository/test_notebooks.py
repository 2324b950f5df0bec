"""The notebook runs as a program, from start to end."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import HANG_S

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "grpo_dist/guides/notebooks").glob("*.py"))


def test_the_guides_list_all() -> None:
    listed = (ROOT / "grpo_dist/guides/notebooks/README.md").read_text()
    assert NOTEBOOKS and all(f"]({path.name})" in listed for path in NOTEBOOKS)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_marimo_finds_nothing_wrong(path: Path) -> None:
    """No name is defined twice, no cell depends on itself, and the file is as marimo writes it."""
    command = [sys.executable, "-m", "marimo", "check", "--strict", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ast.get_docstring(ast.parse(path.read_text())) is None  # marimo would remove it


@pytest.mark.machine
@pytest.mark.slow
def test_a_reward_and_a_loop_of_ones_own(tmp_path: Path) -> None:
    """Its assertions are the test's."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "grpo_dist/guides/notebooks/own_reward.py"), "--steps", "3"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"},
        capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    assert (tmp_path / "own_reward_model/model.safetensors").is_file()
