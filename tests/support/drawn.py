"""Random choice of test cases in every run of the suite.

    drawn("stages", CASES, 1)                       cases of one parametrised test
    @pytest.mark.family("whole runs")               whole tests, also of several files
    pytest.mark.family("engines", FILE)             whole files, whose tests share what is started

pytest prints the seed first, and again after a failure; GRPO_DIST_TEST_SEED=... repeats the choice. What is
not drawn is skipped, and the summary says so. With the seed `all`, as in `make evidence`, all cases are
marked as evidence instead.
"""

import os
import random

import pytest

SEED = "GRPO_DIST_TEST_SEED"
FILE = "file"

# How many members of each family a run of the suite has.
FAMILIES = {
    "whole runs": 1,  # each has features of its own; test_end_to_end.py has those of every run
    "same numbers": 1,  # ways to run, and interruptions, that change no number of a run
    # Of other kinds than that of test_engine.py, those that are lost, lines of `gpu-check` with engines.
    "engines": 1,
    "ranks": 1,  # their offload, number and loss, supervised training; test_policy_ranks.py has the rest
    "roles": 1,  # what graders, reward models, the reference and environments compute for a pool
    "new processes": 1,  # what a program of its own shows: an installation, an import, another package
    # What takes a core for a second or more and is neither about the numbers of an update nor about safety.
    "costly": 30,
    "costly actors": 10,
}


def _is_all():
    return os.environ[SEED] == "all"


def _chosen(name, among, count):
    return set(random.Random(f"{os.environ[SEED]} {name}").sample(among, count))


def _left_out(name):
    """Return the mark of a case that this run does not have."""
    if _is_all():
        return pytest.mark.evidence
    return pytest.mark.skip(
        reason=f"not drawn from {name!r} by {SEED}={os.environ[SEED]}; `make evidence` has it"
    )


def drawn(name, cases, count):
    """Choose ``count`` of ``cases`` (arguments of `pytest.param`); skip the rest.

    ``name`` distinguishes draws.
    """
    chosen = set() if _is_all() else _chosen(name, range(len(cases)), count)
    marks = [[] if i in chosen else _left_out(name) for i in range(len(cases))]
    return [pytest.param(*case, marks=own) for case, own in zip(cases, marks, strict=True)]


def one_each(name, first, second):
    """Pair each of ``first`` with one of ``second``, drawn in every run; with the seed `all`, with all."""
    if _is_all():
        return [(a, b) for a in first for b in second]
    rng = random.Random(f"{os.environ[SEED]} {name}")
    return [(a, rng.choice(list(second))) for a in first]


def draw_families(items):
    """Choose the tests or files of each of the `FAMILIES` among the collected ones; skip the rest.

    Of a file that is collected alone all are chosen.
    """
    if len({item.nodeid.partition("::")[0] for item in items}) == 1 and not _is_all():
        return
    families = {name: {} for name in FAMILIES}
    for item in items:
        mark = item.get_closest_marker("family")
        if mark and not item.get_closest_marker("evidence") and not item.get_closest_marker("skip"):
            name, *of_file = mark.args
            member = item.nodeid.partition("::")[0] if of_file == [FILE] else item.nodeid
            families[name].setdefault(member, []).append(item)
    for name, members in families.items():
        count = 0 if _is_all() else min(FAMILIES[name], len(members))
        chosen = _chosen(name, sorted(members), count)
        for item in (item for member, own in members.items() if member not in chosen for item in own):
            item.add_marker(_left_out(name))
