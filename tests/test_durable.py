"""What is published is on the disk before it has its name."""

import errno
import os
import shutil
import time
from types import SimpleNamespace

import pytest

from grpo_dist.cache import cached
from grpo_dist.config import Config
from grpo_dist.durable import DiskFull, alone, check_room, exchange, publish
from grpo_dist.errors import UserError
from grpo_dist.tracking import Tracker


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


def test_a_run_that_ends_for_want_of_room_says_so_in_one_message(tmp_path, monkeypatch):
    config = Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": [{"path": "t"}]},
            "tracking": {"console": False, "tensorboard": False},
        }
    )
    with (
        pytest.raises(DiskFull, match=r"No space left on device \(OSError\); make room there") as ended,
        Tracker(config, tmp_path),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert ended.value.exit_code == 1
    with pytest.raises(OSError, match="of another kind"), Tracker(config, tmp_path):
        raise OSError(errno.EIO, "of another kind")
    # torch does not say why it cannot write.
    unclear = RuntimeError("unexpected pos 576 vs 534")
    check_room(tmp_path, unclear)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))
    with pytest.raises(DiskFull, match="RuntimeError"):
        check_room(tmp_path, unclear)


def test_names_are_exchanged_at_once(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    assert exchange(tmp_path / "one", tmp_path / "other")
    assert [(tmp_path / name / "file").read_text() for name in ("one", "other")] == ["other", "one"]
    with pytest.raises(FileNotFoundError, match="nothing"):
        exchange(tmp_path / "one", tmp_path / "nothing")


def test_a_directory_is_for_one_process_at_a_time_and_another_waits_for_a_while(tmp_path):
    with alone(tmp_path, "here"):
        begin = time.monotonic()
        with (
            pytest.raises(UserError, match="another process is there"),
            alone(tmp_path, "there", patience_s=0.3),
        ):
            raise AssertionError
        assert time.monotonic() - begin >= 0.3
    with alone(tmp_path, "here again"):
        pass


def test_a_directory_without_locks_is_used_all_the_same(tmp_path, monkeypatch):
    def refuses(*_):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr("fcntl.flock", refuses)
    with alone(tmp_path, "here"):
        pass
