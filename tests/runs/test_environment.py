"""The environment that a run directory records."""

import json
import subprocess
import sys

import pytest

from grpo_dist import __version__
from grpo_dist.runs.run_directory import (
    ENVIRONMENT,
    _changed,
    _commit,
    installed,
    write_environment,
)


def test_versions_and_machine_are_those_of_this_process(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["grpo-dist", "train", "a.yaml", "steps=3", "judge.api_key=sesame"])
    write_environment(tmp_path)
    text = (tmp_path / ENVIRONMENT).read_text()
    found = json.loads(text)
    assert found["versions"]["grpo-dist"] == __version__
    assert found["versions"]["torch"] == installed("torch")
    assert found["python"] == sys.version.split()[0] and found["cpus"] >= 1 and found["memory_gib"] > 0
    assert found["processor"]
    assert found["command"] == ["grpo-dist", "train", "a.yaml", "steps=3", "judge.api_key=***"]
    assert "sesame" not in text


def test_a_resumed_run_keeps_when_it_was_first_launched(tmp_path):
    write_environment(tmp_path)
    first = json.loads((tmp_path / ENVIRONMENT).read_text())
    earlier = {"started": "2026-01-01T00:00:00+00:00"}  # as runs before the key wrote it
    (tmp_path / ENVIRONMENT).write_text(json.dumps(earlier))
    write_environment(tmp_path)
    second = json.loads((tmp_path / ENVIRONMENT).read_text())
    assert first["first_started"] == first["started"]
    assert second["first_started"] == earlier["started"] != second["started"]


@pytest.fixture
def git(tmp_path):
    somebody = ["-c", "user.name=x", "-c", "user.email=x@x"]
    return lambda *arguments: subprocess.run(["git", "-C", tmp_path, *somebody, *arguments], check=True)


def test_the_commit_is_that_of_this_package_and_not_of_an_enclosing_repository(tmp_path, git):
    installed_at = tmp_path / ".venv" / "grpo_dist"
    installed_at.mkdir(parents=True)
    (installed_at / "__init__.py").touch()
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "somebody's project")
    assert _commit(installed_at) is None
    git("add", ".venv")
    git("commit", "-q", "-m", "now it is of it")
    head = subprocess.run(["git", "-C", tmp_path, "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    assert _commit(installed_at) == head[:12]


def test_changed_files_of_the_commit_are_named(tmp_path, git):
    package = tmp_path / "grpo_dist"
    package.mkdir()
    for name in ("grpo_dist/__init__.py", "a note é.md", "same.md"):
        (tmp_path / name).write_text("1\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "all")
    assert _changed(package) == [] and _changed(tmp_path.parent) == []
    for name in ("grpo_dist/__init__.py", "a note é.md", "untracked.md"):
        (tmp_path / name).write_text("2\n")
    assert _commit(package).endswith("-dirty")
    assert _changed(package) == ["a note é.md", "grpo_dist/__init__.py"]
