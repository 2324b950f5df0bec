"""Background work: in order, bounded, and never failing silently."""

import threading

import pytest

from grpo_dist.observe.tracker import Tracker
from grpo_dist.runtime.concurrency import Background
from tests.support import fakes
from tests.support.patience import HANG_S


def test_work_is_done_in_order_and_a_flush_waits_for_all_of_it():
    done = []
    background = Background("test", pending=2)
    for i in range(20):
        background.submit(lambda i=i: done.append(i))
    background.flush()
    assert done == list(range(20))
    background.submit(lambda: done.append("last"))
    background.close()
    assert done[-1] == "last"


def test_a_full_queue_blocks_the_caller():
    gate, background = threading.Event(), Background("test", pending=2)
    for _ in range(3):  # one runs, two wait
        background.submit(gate.wait)
    caller = threading.Thread(target=background.submit, args=(lambda: None,))
    caller.start()
    caller.join(0.2)
    assert caller.is_alive()
    gate.set()
    caller.join(HANG_S)
    assert not caller.is_alive()
    background.close()


def test_a_failure_is_raised_by_the_next_call_and_later_work_is_skipped():
    done, background = [], Background("test", pending=4)

    def fail():
        raise OSError("disk full")

    gate = threading.Event()
    for work in (gate.wait, fail, lambda: done.append("after")):
        background.submit(work)
    gate.set()
    for call in (background.flush, lambda: background.submit(fail), background.close):
        with pytest.raises(OSError, match="disk full"):
            call()
    assert done == []


def quiet(**settings):
    return fakes.config(tracking={"console": False, "tensorboard": False} | settings)


def test_samples_are_on_disk_after_a_flush_and_at_the_end(tmp_path):
    with Tracker(quiet(), tmp_path) as tracker:
        tracker.samples("step_000001", [])
        tracker.flush()
        assert (tmp_path / "samples/step_000001.parquet").exists()
        tracker.samples("step_000002", [])
    assert (tmp_path / "samples/step_000002.parquet").exists()


def test_a_table_that_cannot_be_written_ends_the_run(tmp_path, monkeypatch):
    def full(path, groups, values):
        raise OSError(f"{path.name}: disk full")

    monkeypatch.setattr("grpo_dist.observe.tracker.write_groups", full)
    with pytest.raises(OSError, match=r"step_000001\.parquet: disk full"), Tracker(quiet(), tmp_path) as run:
        run.samples("step_000001", [])
    with pytest.raises(RuntimeError, match="its own"), Tracker(quiet(), tmp_path) as run:
        run.samples("step_000001", [])
        raise RuntimeError("its own")


def test_waiting_for_a_hanging_disk_has_a_deadline(monkeypatch):
    work_begun, stuck = threading.Event(), threading.Event()
    background = Background("tables", pending=1)
    background.submit(lambda: (work_begun.set(), stuck.wait(HANG_S)))
    assert work_begun.wait(HANG_S)
    background.submit(lambda: None)
    monkeypatch.setattr("grpo_dist.runtime.concurrency._DEADLINE_S", 0.05)
    for call in (background.flush, lambda: background.submit(lambda: None)):
        with pytest.raises(TimeoutError, match=r"tables: not done within 0\.05 s; is the disk full"):
            call()
    stuck.set()
    monkeypatch.setattr("grpo_dist.runtime.concurrency._DEADLINE_S", HANG_S)
    background.close()


@pytest.mark.parametrize("waiting", [0, 1])
def test_closing_has_the_same_deadline_with_a_full_and_an_empty_queue(monkeypatch, waiting):
    work_begun, stuck = threading.Event(), threading.Event()
    background = Background("tables", pending=1)
    background.submit(lambda: (work_begun.set(), stuck.wait(HANG_S)))
    assert work_begun.wait(HANG_S)
    for _ in range(waiting):
        background.submit(lambda: None)
    monkeypatch.setattr("grpo_dist.runtime.concurrency._DEADLINE_S", 0.3)
    with pytest.raises(TimeoutError, match=r"tables: not done within 0\.3 s"):
        background.close()
    assert not stuck.is_set()
    stuck.set()
