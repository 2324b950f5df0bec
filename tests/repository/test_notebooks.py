"""The notebooks run as programs, from start to end. Those that start engines are for a quiet machine."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import HANG_S

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "grpo_dist/guides/notebooks").glob("*.py"))


def execute(name: str, directory: Path, *arguments: str) -> str:
    """Run a notebook as a program in ``directory``; return what it printed. Its assertions are the test's."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "grpo_dist/guides/notebooks" / f"{name}.py"), *arguments],
        cwd=directory, env=environment, capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return done.stdout


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
@pytest.mark.long
@pytest.mark.slow
def test_a_first_run(tmp_path: Path) -> None:
    execute("first_run", tmp_path, "--steps", "4")
    assert (tmp_path / "runs/first_run/DONE").is_file()


@pytest.mark.machine
@pytest.mark.slow
def test_a_reward_and_a_loop_of_ones_own(tmp_path: Path) -> None:
    execute("own_reward", tmp_path, "--steps", "3")
    assert (tmp_path / "own_reward_model/model.safetensors").is_file()


@pytest.mark.machine
@pytest.mark.slow
def test_from_demonstrations_to_a_distilled_model(tmp_path: Path) -> None:
    execute("sft_rl_distill", tmp_path, "--steps", "4", "--sft_steps", "150")
