"""`make test` runs a fixed selection of tests."""

import pytest

from tests.support.tiers import ALL, one_each, slow_after


def test_cases_behind_the_first_ones_are_slow():
    cases = slow_after([(i, "x") for i in range(4)], 2)
    assert [case.values for case in cases] == [(i, "x") for i in range(4)]
    assert [[mark.name for mark in case.marks] for case in cases] == [[], [], ["slow"], ["slow"]]


@pytest.mark.parametrize(("every", "expected"), [("", 5), ("1", 15)])
def test_each_loss_is_paired_with_a_mode_and_every_mode_is_used(monkeypatch, every, expected):
    monkeypatch.setenv(ALL, every)
    pairs = one_each("abcde", "xyz")
    assert len(pairs) == expected
    assert {a for a, _ in pairs} == set("abcde") and {b for _, b in pairs} == set("xyz")
