"""A run of the suite draws its cases by seed."""

import os
import subprocess
import sys

import pytest

from tests.support import drawn as support
from tests.support.documents import ROOT
from tests.support.drawn import FILE, SEED, draw_families, drawn
from tests.support.patience import HANG_S

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


def test_cases_that_are_not_drawn_are_skipped_and_evidence_runs_all(monkeypatch):
    monkeypatch.setenv(SEED, "7")
    cases = drawn("a", CASES, 2)
    assert [case.values for case in cases] == CASES
    marks = [mark for case in cases for mark in case.marks]
    assert [mark.name for mark in marks] == ["skip"] * 3
    assert marks[0].kwargs["reason"] == f"not drawn from 'a' by {SEED}=7; `make evidence` has it"
    monkeypatch.setenv(SEED, "all")
    cases = drawn("a", CASES, 2)
    assert [mark.name for case in cases for mark in case.marks] == ["evidence"] * 5


class Item:
    """A collected test."""

    def __init__(self, nodeid, *marks):
        self.nodeid, self.marks = nodeid, list(marks)

    def get_closest_marker(self, name):
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, mark):
        self.marks.append(mark.mark)


@pytest.fixture
def families(monkeypatch):
    """Families of which a run has two, one and one."""
    monkeypatch.setattr(support, "FAMILIES", {"a": 2, "b": 1, "c": 1})


def collected(counts):
    items = [Item(f"{name}{i}", pytest.mark.family(name).mark) for name, n in counts for i in range(n)]
    return [*items, Item("alone")]


def without(items, mark):
    return [item.nodeid for item in items if not item.get_closest_marker(mark)]


def test_every_run_has_some_tests_of_each_family_and_every_test_is_drawn_by_some_seed(monkeypatch, families):
    seen = set()
    for seed in range(60):
        monkeypatch.setenv(SEED, str(seed))
        items, others = collected([("a", 3), ("b", 2), ("c", 1)]), collected([("c", 1), ("b", 2), ("a", 3)])
        draw_families(items)
        draw_families(others)
        chosen = without(items, "skip")
        assert [name.rstrip("0123") for name in chosen] == ["a", "a", "b", "c", "alone"]
        assert sorted(chosen) == sorted(without(others, "skip")), "whatever the order of collection"
        seen |= set(chosen)
    assert seen == {"a0", "a1", "a2", "b0", "b1", "c0", "alone"}


def test_files_are_drawn_with_all_their_tests(monkeypatch, families):
    def items():
        whole = pytest.mark.family("b", FILE).mark
        files = [Item(f"{file}.py::test_{i}", whole) for file in "xyz" for i in range(3)]
        return [*files, Item("w.py::test_alone", pytest.mark.family("b").mark)]

    found = set()
    for seed in range(60):
        monkeypatch.setenv(SEED, str(seed))
        own = items()
        draw_families(own)
        found.add(tuple(without(own, "skip")))
    files = {tuple(f"{file}.py::test_{i}" for i in range(3)) for file in "xyz"}
    assert found == {*files, ("w.py::test_alone",)}


def test_a_test_for_a_quiet_machine_is_not_the_one_that_is_drawn(monkeypatch, families):
    for seed in range(10):
        monkeypatch.setenv(SEED, str(seed))
        items = collected([("b", 2)])
        items[0].marks.append(pytest.mark.evidence.mark)
        draw_families(items)
        assert without(items, "skip") == ["b0", "b1", "alone"]


def test_a_test_that_is_left_out_already_takes_no_place(monkeypatch, families):
    for seed in range(10):
        monkeypatch.setenv(SEED, str(seed))
        items = collected([("b", 2)])
        items[0].marks.append(pytest.mark.skip(reason="not drawn").mark)
        draw_families(items)
        assert without(items, "skip") == ["b1", "alone"]


def test_a_file_that_is_collected_alone_has_all_its_tests(monkeypatch, families):
    monkeypatch.setenv(SEED, "1")
    items = [Item(f"some.py::test_{i}", pytest.mark.family("b").mark) for i in range(5)]
    draw_families(items)
    assert len(without(items, "skip")) == 5


def test_evidence_has_all_tests_of_all_families(monkeypatch, families):
    monkeypatch.setenv(SEED, "all")
    items = collected([("a", 3), ("b", 2)])
    draw_families(items)
    assert without(items, "skip") == [item.nodeid for item in items]
    assert without(items, "evidence") == ["alone"]


def test_a_family_that_is_not_listed_is_an_error(families):
    with pytest.raises(KeyError, match="misspelt"):
        draw_families(collected([("misspelt", 1)]))


_FILE = """
import pytest
from tests.support.drawn import drawn

@pytest.mark.parametrize("i", drawn("numbers", [(1,), (2,)], 1))
def test_number(i):
    assert i == 0

@pytest.mark.family("roles")
def test_a(): pass
"""
_OTHER = """
import pytest

@pytest.mark.family("roles")
def test_b(): pass
"""


@pytest.mark.parametrize(("seed", "marked", "processes", "counts"), [
    ("3", "not evidence", "2", "1 failed, 1 passed, 2 skipped"),
    ("all", "evidence", "0", "2 failed, 2 passed"),
])  # fmt: skip
def test_a_run_reports_what_it_leaves_out_and_after_a_failure_how_to_repeat_the_draw(
    tmp_path, seed, marked, processes, counts
):
    """With several processes, too: each draws the same."""
    (tmp_path / "test_some.py").write_text(_FILE)
    (tmp_path / "test_other.py").write_text(_OTHER)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", processes, "-m", marked, "-p", "tests.conftest",
         "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml", "--rootdir", tmp_path,
         "test_some.py", "test_other.py"],
        cwd=tmp_path, env=os.environ | {SEED: seed, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 1 and f" {counts} in " in done.stdout, done.stdout + done.stderr
    assert f"the same draw of cases: {SEED}={seed}\n" in done.stdout
    reasons = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert len(reasons) == (0 if seed == "all" else 2)
    assert all(line.endswith(f"by {SEED}={seed}; `make evidence` has it") for line in reasons)
