"""Cases that are chosen at random in every run of the suite.

The seed is printed at the head of pytest's output, and GRPO_DIST_TEST_SEED=... repeats the choice. With the
seed `all`, as in `make evidence`, all cases are evidence.
"""

import os
import random

import pytest

SEED = "GRPO_DIST_TEST_SEED"


def drawn(name, cases, count):
    """``count`` of ``cases``, which are arguments of `pytest.param`, for every run, and the rest as evidence.
    ``name`` tells one draw from another.
    """
    count = 0 if os.environ[SEED] == "all" else count
    chosen = set(random.Random(f"{os.environ[SEED]} {name}").sample(range(len(cases)), count))
    return [
        pytest.param(*case, marks=[] if i in chosen else pytest.mark.evidence) for i, case in enumerate(cases)
    ]
