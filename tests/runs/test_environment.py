"""The environment that a run directory records."""

import json
import subprocess
import sys

import pytest

from grpo_dist import __version__
from grpo_dist.runs.run_directory import ENVIRONMENT, _changed, _commit, installed, write_environment


def test_versions_and_machine_are_those_of_this_process(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["grpo-dist", "train", "a.yaml", "steps=3", "judge.api_key=sesame"])
    write_environment(tmp_path)
    text = (tmp_path / ENVIRONMENT).read_text()
    record = json.loads(text)
    assert record["versions"]["grpo-dist"] == __version__
    assert record["versions"]["torch"] == installed("torch")
    assert record["python"] == sys.version.split()[0] and record["cpus"] >= 1 and record["memory_gib"] > 0
    assert record["processor"]
    assert record["command"] == ["grpo-dist", "train", "a.yaml", "steps=3", "judge.api_key=***"]
    assert "sesame" not in text


def test_a_resumed_run_keeps_when_it_was_first_launched(tmp_path):
    write_environment(tmp_path)
    first = json.loads((tmp_path / ENVIRONMENT).read_text())
    earlier = {"started": "2026-01-01T00:00:00+00:00"}  # as older runs without `first_started` wrote it
    (tmp_path / ENVIRONMENT).write_text(json.dumps(earlier))
    write_environment(tmp_path)
    second = json.loads((tmp_path / ENVIRONMENT).read_text())
    assert first["first_started"] == first["started"]
    assert second["first_started"] == earlier["started"] != second["started"]


@pytest.fixture
def git(tmp_path):
    author = ["-c", "user.name=x", "-c", "user.email=x@x"]
    return lambda *arguments: subprocess.run(["git", "-C", tmp_path, *author, *arguments], check=True)


def test_the_commit_is_that_of_this_package_and_not_of_an_enclosing_repository(tmp_path, git):
    package = tmp_path / ".venv" / "grpo_dist"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "somebody's project")
    assert _commit(package) is None
    git("add", ".venv")
    git("commit", "-q", "-m", "now it is of it")
    head = subprocess.run(["git", "-C", tmp_path, "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    assert _commit(package) == head[:12]


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
