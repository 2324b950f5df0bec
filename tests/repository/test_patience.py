"""The limits of tests, on a simulated clock."""

import time
from types import SimpleNamespace

import pytest

from tests.support.patience import cpu_s, wait_for_end, wait_until


@pytest.fixture
def clock(monkeypatch):
    """A clock on which every sleep takes a minute."""
    now = [0.0]
    monkeypatch.setattr("tests.support.patience.time.monotonic", lambda: now[0])
    monkeypatch.setattr("tests.support.patience.time.sleep", lambda _: now.__setitem__(0, now[0] + 60))
    return now


def test_a_condition_that_never_holds_is_named(clock):
    wait_until(lambda: clock[0] > 600, "never")
    with pytest.raises(AssertionError, match="no line"):
        wait_until(lambda: False, lambda: "no line")


def test_a_process_may_take_longer_than_its_limit_while_it_makes_progress(clock):
    process = SimpleNamespace(poll=lambda: 3 if clock[0] > 10_000 else None)
    assert wait_for_end(process, lambda: clock[0] // 600) == 3
    clock[0] = 0.0
    with pytest.raises(AssertionError, match="no progress for 1200 s: 7"):
        wait_for_end(process, lambda: 7)


def test_time_that_other_processes_take_is_not_counted():
    with cpu_s(0.1):
        time.sleep(0.2)
    with pytest.raises(AssertionError, match=r"expected 0\.1 s at most"), cpu_s(0.1):
        begin = time.thread_time()
        while time.thread_time() - begin < 0.15:
            pass
