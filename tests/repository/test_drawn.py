"""A run of the suite draws its cases by seed."""

from tests.support.drawn import SEED, drawn

CASES = [(i, "x") for i in range(5)]


def every_run(cases):
    return [case.values[0] for case in cases if not case.marks]


def test_a_seed_decides_the_draw_and_every_case_is_drawn_by_some_seed(monkeypatch):
    seen = set()
    for seed in range(60):
        monkeypatch.setenv(SEED, str(seed))
        chosen = every_run(drawn("a", CASES, 2))
        assert len(chosen) == 2 and chosen == every_run(drawn("a", CASES, 2))
        seen |= set(chosen)
    assert seen == set(range(5))


def test_cases_that_are_not_drawn_are_evidence_which_runs_all(monkeypatch):
    monkeypatch.setenv(SEED, "7")
    cases = drawn("a", CASES, 2)
    assert [case.values for case in cases] == CASES
    assert [mark.name for case in cases for mark in case.marks] == ["evidence"] * 3
    monkeypatch.setenv(SEED, "all")
    assert every_run(drawn("a", CASES, 2)) == []
