"""Random choice of test cases in every run of the suite.

pytest prints the seed first, and GRPO_DIST_TEST_SEED=... repeats the choice. With the seed `all`, as in `make
evidence`, all cases are marked as evidence.
"""

import os
import random

import pytest

SEED = "GRPO_DIST_TEST_SEED"


def drawn(name, cases, count):
    """Choose ``count`` of ``cases`` (arguments of `pytest.param`); mark the rest as evidence.

    ``name`` distinguishes draws.
    """
    count = 0 if os.environ[SEED] == "all" else count
    chosen = set(random.Random(f"{os.environ[SEED]} {name}").sample(range(len(cases)), count))
    return [
        pytest.param(*case, marks=[] if i in chosen else pytest.mark.evidence) for i, case in enumerate(cases)
    ]


def one_each(name, first, second):
    """Pair each of ``first`` with one of ``second``, drawn in every run; with the seed `all`, with all."""
    if os.environ[SEED] == "all":
        return [(a, b) for a in first for b in second]
    rng = random.Random(f"{os.environ[SEED]} {name}")
    return [(a, rng.choice(list(second))) for a in first]
