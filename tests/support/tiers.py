"""The two tiers of the suite: `make test` runs the same tests every time, `make test-all` the slow ones too.

@pytest.mark.slow                              a test that `make test` leaves out
slow_after([case, ...], 2)                     cases of a parametrised test: two are in both tiers
one_each(LOSSES, MODES)                        pairs, each of the first with one of the second
@settings(max_examples=examples(20, 200))      examples of hypothesis in `make test`, and with the slow tests
"""

import os
from itertools import product

import pytest

ALL = "GRPO_DIST_TEST_ALL"  # set by `make test-all`, for tests that cover several cases in one process


def slow_after(cases, count):
    """Mark all of ``cases``, tuples of arguments or one argument each, behind the first ``count`` as slow."""
    cases = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        pytest.param(*case, marks=[] if i < count else [pytest.mark.slow]) for i, case in enumerate(cases)
    ]


def examples(few, many):
    """Return ``few``, or ``many`` for `make test-all`."""
    return many if os.environ.get(ALL) else few


def one_each(first, second):
    """Pair each of ``first`` with one of ``second``, in turn; with all of them for `make test-all`."""
    first, second = list(first), list(second)
    if os.environ.get(ALL):
        return list(product(first, second))
    return [(a, second[i % len(second)]) for i, a in enumerate(first)]
