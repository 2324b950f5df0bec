"""Files are on disk before they get their final name."""

import contextlib
import errno
import os
import shutil
import time
from types import SimpleNamespace

import pytest

from grpo_dist.config import Config
from grpo_dist.errors import UserError
from grpo_dist.observe.samples import write_groups
from grpo_dist.observe.tracker import Tracker
from grpo_dist.runs.run_directory import exclusive_directory
from grpo_dist.runtime.files import LOCK, DiskFull, alone, check_room, clear, exchange, publish, write_text
from grpo_dist.runtime.model_files import cached, cached_path
from tests.support import fakes
from tests.support.patience import HANG_S


@pytest.fixture
def events(monkeypatch):
    """Record flushed and renamed names, in order."""
    recorded = []
    fsync, replace = os.fsync, os.replace

    def record_flush(descriptor):
        recorded.append(("flush", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def record_rename(old, new):
        recorded.append(("rename", os.path.basename(new)))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", record_flush)
    monkeypatch.setattr(os, "replace", record_rename)
    return recorded


def test_every_file_is_flushed_before_the_rename_and_the_name_after_it(tmp_path, events):
    (tmp_path / "partial/inner").mkdir(parents=True)
    (tmp_path / "partial/inner/a").write_text("1")
    publish(tmp_path / "partial", tmp_path / "final")
    assert sorted(events[:3]) == [("flush", "a"), ("flush", "inner"), ("flush", "partial")]
    assert events[3:] == [("rename", "final"), ("flush", tmp_path.name)]
    assert (tmp_path / "final/inner/a").read_text() == "1"


def test_everything_this_project_writes_is_published_durably(tmp_path, events, monkeypatch):
    monkeypatch.setenv("GRPO_DIST_CACHE", str(tmp_path))
    directory = cached("x", {}, lambda partial: (partial / "weights").write_text("1"))
    assert events.index(("flush", "weights")) < events.index(("rename", directory.name))


def test_models_that_a_killed_process_left_unfinished_are_removed_a_day_later(tmp_path, monkeypatch):
    """Whatever model is made next; each may be a whole copy."""
    monkeypatch.setenv("GRPO_DIST_CACHE", str(tmp_path))
    final = cached_path("text-m", {})
    killed, running, foreign = f".{final.name}-abcd_123", f".{final.name}-efgh_456", ".of-another-program"
    for name in (killed, running, foreign):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text("1")
    for name in (killed, foreign):
        os.utime(tmp_path / name, (0, 0))
    made = cached("x", {}, lambda partial: None)
    assert {path.name for path in tmp_path.iterdir()} == {running, foreign, made.name}


def test_a_full_disk_ends_the_run_with_one_message(tmp_path, monkeypatch):
    off, data = {"console": False, "tensorboard": False}, {"train": [{"path": "t"}]}
    config = Config.model_validate({"model": {"path": "m"}, "data": data, "tracking": off})
    with (
        pytest.raises(DiskFull, match=r"No space left on device \(OSError\); free some there") as raised,
        Tracker(config, tmp_path),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert raised.value.exit_code == 1
    with pytest.raises(OSError, match="of another kind"), Tracker(config, tmp_path):
        raise OSError(errno.EIO, "of another kind")
    # torch does not report why it cannot write.
    unclear = RuntimeError("unexpected pos 576 vs 534")
    check_room(tmp_path, unclear)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))
    with pytest.raises(DiskFull, match="RuntimeError"):
        check_room(tmp_path, unclear)


def test_a_disk_too_full_for_the_last_events_ends_the_run_with_the_same_message(tmp_path, monkeypatch):
    """All is closed: the tables, and each tracker, although none can be reported."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    def join(deadline):
        closed.append("tracker")
        full()

    closed = []
    tracker = Tracker(fakes.config(tracking={"console": False, "tensorboard": False}), tmp_path)
    tracker._sinks = [SimpleNamespace(end=lambda *, failed: None, join=join)] * 2
    tracker._writer.submit(lambda: closed.append("table"))
    monkeypatch.setattr(tracker, "note", full)
    with pytest.raises(DiskFull, match=r"No space left on device \(OSError\); free some there"), tracker:
        full()
    assert closed == ["table", "tracker", "tracker"]


def test_names_are_exchanged_atomically(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    assert exchange(tmp_path / "one", tmp_path / "other")
    assert [(tmp_path / name / "file").read_text() for name in ("one", "other")] == ["other", "one"]
    with pytest.raises(FileNotFoundError, match="nothing"):
        exchange(tmp_path / "one", tmp_path / "nothing")


def test_a_directory_is_locked_by_one_process_and_another_waits_for_it(tmp_path):
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


def test_a_file_system_without_locks_is_usable(tmp_path, monkeypatch):
    def refuses(*_):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr("fcntl.flock", refuses)
    with alone(tmp_path, "here"):
        pass


def test_a_lock_that_is_deleted_or_replaced_lets_no_second_process_in(tmp_path):
    with alone(tmp_path, "here"):
        for replace in (lambda: None, lambda: (tmp_path / LOCK).touch()):
            (tmp_path / LOCK).unlink(missing_ok=True)
            replace()
            with pytest.raises(UserError, match="another process is there"), alone(tmp_path, "there"):
                raise AssertionError
    with alone(tmp_path, "here again"):
        pass


def test_a_waiter_for_a_removed_directory_locks_its_successor(tmp_path, monkeypatch):
    """A lock in the removed directory would lock out nobody."""
    directory = tmp_path / "run"
    directory.mkdir()
    waits = []

    def removed_meanwhile(_):
        if not waits:
            shutil.rmtree(directory)
            first.close()
        waits.append(1)

    # Patch only that module: other threads of this process sleep, too.
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=removed_meanwhile)
    monkeypatch.setattr("grpo_dist.runtime.files.time", clock)
    with contextlib.ExitStack() as first:
        first.enter_context(alone(directory, "here"))
        with alone(directory, "waiting", patience_s=HANG_S):
            assert waits and (directory / LOCK).exists()
            with pytest.raises(UserError, match="another process is there"), alone(directory, "there"):
                raise AssertionError


@pytest.mark.parametrize("kind", ["link", "link to nothing", "hard link", "pipe", "directory"])
def test_a_lock_that_is_a_link_is_not_followed(tmp_path, kind):
    run, precious = tmp_path / "run", tmp_path / "other"
    run.mkdir()
    precious.write_text("precious")
    lock = run / LOCK
    {
        "link": lambda: lock.symlink_to(precious),
        "link to nothing": lambda: lock.symlink_to(tmp_path / "nothing"),
        "hard link": lambda: lock.hardlink_to(precious),
        "pipe": lambda: os.mkfifo(lock),
        "directory": lock.mkdir,
    }[kind]()
    expected = contextlib.nullcontext() if kind == "hard link" else pytest.raises((UserError, OSError))
    with expected, alone(run, "here"):
        pass
    assert precious.read_text() == "precious" and not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("target", ["other", "nothing"])
def test_a_partial_file_that_is_a_link_is_not_followed(tmp_path, target):
    (tmp_path / "other").write_text("precious")
    partials = {
        ".a.partial": lambda: write_text(tmp_path / "a", "1"),
        ".b.parquet.partial": lambda: write_groups(tmp_path / "b.parquet", []),
    }
    for name, write in partials.items():
        (tmp_path / name).symlink_to(tmp_path / target)
        write()
        assert not (tmp_path / name.removeprefix(".").removesuffix(".partial")).is_symlink()
    assert (tmp_path / "other").read_text() == "precious" and not (tmp_path / "nothing").exists()


def test_leftovers_are_removed_and_targets_of_links_are_not(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/file").touch()
    (tmp_path / "link").symlink_to("kept")
    (tmp_path / "own/inner").mkdir(parents=True)
    for name in ("link", "own", "nothing"):
        clear(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"] and (tmp_path / "kept/file").exists()


def test_a_run_refused_because_another_process_trains_it_removes_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_dist.runs.run_directory.LOCK_PATIENCE_S", 0.0)
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    with alone(run, "training"):
        with pytest.raises(UserError, match="another process"), exclusive_directory(run, tmp_path):
            raise AssertionError
        assert (run / LOCK).exists()
    with pytest.raises(UserError, match="refused"), exclusive_directory(run, tmp_path):
        raise UserError("refused")
    assert not (tmp_path / "runs").exists()


def test_a_file_takes_the_place_of_no_device_or_fifo(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UserError, match="fifo: a device, FIFO or socket"):
        write_text(tmp_path / "fifo", "x")
    (tmp_path / "made").write_text("x")
    with pytest.raises(UserError, match="fifo: a device, FIFO or socket"):
        publish(tmp_path / "made", tmp_path / "fifo")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fifo", "made"]
