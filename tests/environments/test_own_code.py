"""Guarantee: what is fingerprinted of a run's environments is the code of users, and nothing else."""

from __future__ import annotations

from pathlib import Path

from grpo_dist.config import DataConfig, DataSourceConfig, EnvironmentsConfig
from grpo_dist.environments.registry import own_code


def test_own_code_is_that_of_named_modules_in_code_paths(tmp_path: Path) -> None:
    (tmp_path / "games").mkdir()
    for name in ("guess.py", "other.py", "games/__init__.py", "games/chess.py"):
        (tmp_path / name).write_text("")
    sources = [
        DataSourceConfig(path="demo:add3"),
        DataSourceConfig(path="demo:add3", environment="games.chess:Chess"),
        DataSourceConfig(path="demo:add3", environment="calculator"),
        DataSourceConfig(environment="verifiers:other"),
    ]
    data = DataConfig(train=tuple(sources), environment="guess:Guess")
    found = own_code(data, EnvironmentsConfig(code_paths=(str(tmp_path),)))
    assert [str(path.relative_to(tmp_path)) for path in found] == [
        "games/__init__.py", "games/chess.py", "guess.py"
    ]  # fmt: skip
