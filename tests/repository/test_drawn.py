"""Which cases a run of the suite has."""

from tests.support.drawn import SEED, drawn

CASES = [(i, "x") for i in range(5)]


def every_run(cases):
    return [case.values[0] for case in cases if not case.marks]


def test_a_draw_follows_from_its_seed_and_over_the_seeds_every_case_comes(monkeypatch):
    seen = set()
    for seed in range(60):
        monkeypatch.setenv(SEED, str(seed))
        chosen = every_run(drawn("a", CASES, 2))
        assert len(chosen) == 2 and chosen == every_run(drawn("a", CASES, 2))
        seen |= set(chosen)
    assert seen == set(range(5))


def test_what_is_not_drawn_is_evidence_and_there_all_are(monkeypatch):
    monkeypatch.setenv(SEED, "7")
    cases = drawn("a", CASES, 2)
    assert [case.values for case in cases] == CASES
    assert [mark.name for case in cases for mark in case.marks] == ["evidence"] * 3
    monkeypatch.setenv(SEED, "all")
    assert every_run(drawn("a", CASES, 2)) == []
