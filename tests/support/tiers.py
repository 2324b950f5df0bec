"""The two tiers of the suite: `make test` runs a fixed selection of tests, `make test-all` all of them.

@pytest.mark.slow                              a test that `make test` leaves out
slow_after([case, ...], 2)                     cases of a parametrised test: the first two are in both tiers
one_each(LOSSES, MODES)                        pairs, each of the first with one of the second
@settings(max_examples=examples(20, 200))      hypothesis examples in `make test`, and in `make test-all`
"""

import os
from itertools import product

import pytest

ALL = "GRPO_DIST_TEST_ALL"  # set by `make test-all`, for tests that cover several cases in one process


def slow_after(cases, count):
    """Mark all ``cases``, tuples of arguments or single arguments, after the first ``count`` as slow."""
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
