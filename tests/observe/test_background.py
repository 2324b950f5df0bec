"""Work beside the loop: in order, bounded, and never failing unseen."""

import threading

import pytest

from grpo_dist.observe import Tracker
from grpo_dist.runtime.background import Background
from tests.support import fakes
from tests.support.patience import HANG_S


def test_work_is_done_in_order_and_all_of_it_by_the_time_of_a_flush():
    done = []
    background = Background("test", pending=2)
    for i in range(20):
        background.submit(lambda i=i: done.append(i))
    background.flush()
    assert done == list(range(20))
    background.submit(lambda: done.append("last"))
    background.close()
    assert done[-1] == "last"


def test_who_hands_in_more_than_may_wait_is_held_up():
    gate, background = threading.Event(), Background("test", pending=2)
    for _ in range(3):  # one is being done, two wait
        background.submit(gate.wait)
    held_up = threading.Thread(target=background.submit, args=(lambda: None,))
    held_up.start()
    held_up.join(0.2)
    assert held_up.is_alive()
    gate.set()
    held_up.join(5)
    assert not held_up.is_alive()
    background.close()


def test_a_failure_is_raised_by_the_next_call_and_what_came_after_it_is_not_done():
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


def test_a_disk_that_takes_nothing_is_not_waited_for_without_end(monkeypatch):
    monkeypatch.setattr("grpo_dist.runtime.background._DEADLINE_S", 0.05)
    stuck = threading.Event()
    background = Background("tables", pending=1)
    background.submit(lambda: stuck.wait(HANG_S))
    background.submit(lambda: None)
    for late in (background.flush, lambda: background.submit(lambda: None)):
        with pytest.raises(TimeoutError, match=r"tables: not done within 0\.05 s; is the disk full"):
            late()
    stuck.set()
    monkeypatch.setattr("grpo_dist.runtime.background._DEADLINE_S", HANG_S)
    background.close()


@pytest.mark.parametrize("waiting", [0, 1])
def test_the_end_does_not_wait_longer_for_such_a_disk_whether_the_queue_is_full_or_not(monkeypatch, waiting):
    monkeypatch.setattr("grpo_dist.runtime.background._DEADLINE_S", 0.3)
    begun, stuck = threading.Event(), threading.Event()
    background = Background("tables", pending=1)
    background.submit(lambda: (begun.set(), stuck.wait(HANG_S)))
    assert begun.wait(HANG_S)
    for _ in range(waiting):
        background.submit(lambda: None)
    with pytest.raises(TimeoutError, match=r"tables: not done within 0\.3 s"):
        background.close()
    assert not stuck.is_set()
    stuck.set()
