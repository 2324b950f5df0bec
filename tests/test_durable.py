"""What is published is on the disk before it has its name."""

import os

import pytest

from grpo_dist.cache import cached
from grpo_dist.durable import publish


@pytest.fixture
def events(monkeypatch):
    """Names that were flushed and renamed, in order."""
    seen = []
    fsync, replace = os.fsync, os.replace

    def flushed(descriptor):
        seen.append(("flush", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def renamed(old, new):
        seen.append(("rename", os.path.basename(new)))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", renamed)
    return seen


def test_every_file_is_flushed_before_the_rename_and_the_name_after_it(tmp_path, events):
    (tmp_path / "partial/inner").mkdir(parents=True)
    (tmp_path / "partial/inner/a").write_text("1")
    publish(tmp_path / "partial", tmp_path / "final")
    assert sorted(events[:3]) == [("flush", "a"), ("flush", "inner"), ("flush", "partial")]
    assert events[3:] == [("rename", "final"), ("flush", tmp_path.name)]
    assert (tmp_path / "final/inner/a").read_text() == "1"


def test_what_this_project_makes_is_published_so(tmp_path, events, monkeypatch):
    monkeypatch.setenv("GRPO_DIST_CACHE", str(tmp_path))
    made = cached("x", {}, lambda directory: (directory / "weights").write_text("1"))
    assert events.index(("flush", "weights")) < events.index(("rename", made.name))
