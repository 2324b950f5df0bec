"""Estimates from samples, against numbers worked by hand and against counting every subset."""

from itertools import combinations
from math import comb

import numpy as np
import pytest

from grpo_dist.evaluation.estimates import pass_at_k, summarise

NAN = float("nan")


def flags(text: str) -> np.ndarray:
    """ "10x" -> right, wrong, not scorable."""
    return np.array([NAN if c == "x" else float(c) for c in text], dtype=np.float32)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer():
    for n in range(1, 7):
        for c in range(n + 1):
            for k in range(1, n + 1):
                hits = sum(any(i < c for i in subset) for subset in combinations(range(n), k))
                assert pass_at_k(n, c, k) == pytest.approx(hits / comb(n, k), abs=1e-12)


def test_pass_at_k_stays_exact_where_binomials_overflow():
    exact = 1 - comb(9_990, 500) / comb(10_000, 500)
    assert pass_at_k(10_000, 10, 500) == pytest.approx(exact, rel=1e-12)


def test_pass_at_k_from_too_few_samples_is_refused():
    with pytest.raises(ValueError, match="pass@3 cannot be estimated from 2 samples"):
        pass_at_k(2, 1, 3)


def test_summary_of_three_problems_worked_by_hand():
    summary = summarise([flags("1000"), flags("1100"), flags("0000")], [1, 2])
    # pass@1: 1/4, 1/2, 0. pass@2: 1 - 3/6, 1 - 1/6, 0.
    assert summary["pass@1"] == pytest.approx(0.25)
    assert summary["pass@1_stderr"] == pytest.approx(0.25 / np.sqrt(3))
    assert summary["pass@2"] == pytest.approx((1 / 2 + 5 / 6) / 3)
    assert summary["pass@2_stderr"] == pytest.approx(np.std([1 / 2, 5 / 6, 0], ddof=1) / np.sqrt(3))
    assert summary["avg@4"] == pytest.approx(0.25)
    assert set(summary) == {f"{n}{s}" for n in ("pass@1", "pass@2", "avg@4") for s in ("", "_stderr")}


def test_what_could_not_be_scored_is_left_out_and_not_counted_as_wrong():
    summary = summarise([flags("1x"), flags("01"), flags("xx")], [1, 2])
    assert summary["pass@1"] == pytest.approx((1 + 0.5) / 2)  # the third problem has no scored sample
    assert summary["pass@2"] == 1.0  # only the second has two
    assert np.isnan(summary["pass@2_stderr"])
    assert summary["avg@2"] == pytest.approx((1 + 0.5) / 2)


def test_order_of_samples_and_problems_does_not_matter():
    rng = np.random.default_rng(0)
    problems = [rng.choice([0.0, 1.0, NAN], size=8) for _ in range(20)]
    shuffled = [rng.permutation(p) for p in rng.permutation(np.array(problems))]
    first, second = summarise(problems, [1, 2, 4]), summarise(shuffled, [1, 2, 4])
    assert first == pytest.approx(second, rel=1e-12)
    assert first["pass@1"] < first["pass@2"] < first["pass@4"]


def test_one_sample_a_problem_gives_accuracy_with_its_binomial_error():
    summary = summarise([flags("1")] * 30 + [flags("0")] * 70, [1])
    assert summary == pytest.approx({"pass@1": 0.3, "pass@1_stderr": np.sqrt(0.3 * 0.7 / 99)})


def test_nothing_to_estimate_from_is_nan_and_not_zero():
    assert all(np.isnan(v) for v in summarise([flags("xx")], [1]).values())
    assert all(np.isnan(v) for v in summarise([], [1]).values())
