"""Two models on the same problems: against numbers worked by hand and full enumeration of signs."""

import json
import math
from itertools import product

import numpy as np
import pytest

from grpo_dist.tools.evaluate.compare import MCNEMAR, SIGN_FLIPS, compare, mcnemar, paired, sign_flips


def result(directory, model, problems, settings=None):
    """Write a result as `grpo-dist eval` does, from {set: [value of each problem]}."""
    directory.mkdir()
    report = {"model": model, "fingerprint": model, "settings": settings or {"seed": 0}}
    (directory / "result.json").write_text(json.dumps(report))
    rows = [
        {"set": name, "uid": f"{name}-{i}", "problem": f"problem {i}", "values": values}
        for name, per_problem in problems.items()
        for i, values in enumerate(per_problem)
    ]
    (directory / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def test_mcnemars_p_is_that_of_a_fair_coin():
    assert mcnemar(9, 1) == pytest.approx(2 * 11 / 1024)
    assert mcnemar(1, 9) == mcnemar(9, 1)
    assert mcnemar(5, 0) == pytest.approx(2 / 32)
    assert mcnemar(3, 3) == mcnemar(0, 0) == 1.0
    assert mcnemar(700, 800) == pytest.approx(0.0105, abs=3e-4)  # 2^1500 overflows a float


def test_the_exact_sign_test_equals_enumeration():
    rng = np.random.default_rng(0)
    for _ in range(20):
        gains = rng.integers(-4, 5, size=int(rng.integers(1, 9))) / 4
        sums = [abs(np.dot(signs, gains)) for signs in product((-1, 1), repeat=len(gains))]
        expected = np.mean([s >= abs(gains.sum()) - 1e-12 for s in sums])
        assert sign_flips(gains) == (pytest.approx(expected), SIGN_FLIPS)


def test_the_random_sign_test_agrees_with_the_exact_one_and_is_reproducible():
    rng = np.random.default_rng(1)
    gains = rng.choice([-0.25, 0.0, 0.25, 0.5], size=40)
    p, test = sign_flips(gains)
    assert "100,000 drawn" in test and sign_flips(gains) == (p, test)
    # The exact value: the distribution of sums of +-|gain|, by convolution over quarters.
    ways = np.array([1.0])
    for quarters in (int(4 * abs(g)) for g in gains if g):
        step = np.zeros(2 * quarters + 1)
        step[0] = step[-1] = 0.5
        ways = np.convolve(ways, step)
    sums = np.arange(len(ways)) - len(ways) // 2
    exact = ways[np.abs(sums) >= abs(4 * gains.sum())].sum()
    assert p == pytest.approx(exact, abs=4 * math.sqrt(exact / 100_000))


def test_for_single_samples_both_tests_are_the_same():
    first, second = [0.0] * 9 + [1.0] + [1.0] * 10, [1.0] * 9 + [0.0] + [1.0] * 10
    gain = paired(first, second)
    assert (gain.test, gain.p) == (MCNEMAR, pytest.approx(2 * 11 / 1024))
    assert sign_flips(np.subtract(second, first))[0] == pytest.approx(gain.p)
    assert gain.value == pytest.approx(8 / 20)
    # Agresti and Min: b = 9.5, c = 1.5 of 22.
    half = 1.959964 * math.sqrt((9.5 + 1.5) / 22 - (8 / 22) ** 2) / math.sqrt(22)
    assert (gain.low, gain.high) == pytest.approx((8 / 22 - half, 8 / 22 + half), abs=1e-6)


def test_sampled_averages_have_students_interval():
    gain = paired([0.25, 0.5, 0.0, 0.75], [0.5, 0.75, 0.75, 0.5])  # gains 0.25, 0.25, 0.75, -0.25
    half = 3.182 * math.sqrt((0 + 0 + 0.25 + 0.25) / 3) / 2
    assert (gain.low, gain.high) == pytest.approx((0.25 - half, 0.25 + half), abs=0.005)
    # The sum is 1. With + 0.75 it is at least 1 unless two of the other three are negative: 4 of 8 cases.
    assert gain.p == 8 / 16 and gain.test == SIGN_FLIPS


def test_the_interval_of_a_zero_difference_has_a_width():
    gain = paired([1.0] * 30, [1.0] * 30)
    assert (gain.value, gain.p) == (0.0, 1.0) and -0.1 < gain.low < 0 < gain.high < 0.1


@pytest.mark.slow
def test_intervals_of_differences_cover_the_truth_at_their_nominal_rate():
    # Quantiles of Beta(1/2, 1/2) are sin^2: the mean of min(x + 0.1, 1) - x.
    x = np.sin(np.linspace(0, 1, 1_000_001) * math.pi / 2) ** 2
    truth = float(np.mean(np.minimum(x + 0.1, 1) - x))
    rng, covered, runs = np.random.default_rng(0), 0, 1000
    for _ in range(runs):
        easy = rng.beta(0.5, 0.5, size=40)
        better = np.clip(easy + 0.1, 0, 1)
        first, second = rng.binomial(4, easy) / 4, rng.binomial(4, better) / 4
        gain = paired(first.tolist(), second.tolist())
        covered += gain.low <= truth <= gain.high
    assert 0.925 < covered / runs < 0.98


def test_comparisons_pair_problems_by_name_and_have_a_row_for_all(tmp_path):
    a = {"x": [{"avg@4": 0.25, "pass@4": 1.0}, {"avg@4": 0.5}], "y": [{"avg@4": 1.0, "cons@4": 1.0}]}
    b = {"y": [{"avg@4": 0.75}], "x": [{"avg@4": 0.5, "pass@4": 0.0}, {"avg@4": 1.0, "pass@4": 1.0}]}
    comparison = compare(result(tmp_path / "a", "A", a), result(tmp_path / "b", "B", b))
    rows = {(r.set, r.measure): r for r in comparison.rows}
    assert set(rows) == {("x", "avg@4"), ("x", "pass@4"), ("y", "avg@4"), ("all problems", "avg@4"),
                         ("all problems", "pass@4")}  # fmt: skip
    assert rows["x", "avg@4"].first == 0.375 and rows["x", "avg@4"].second == 0.75
    assert rows["x", "pass@4"].problems == 1 and rows["x", "pass@4"].difference.value == -1.0
    assert rows["all problems", "avg@4"].difference.value == pytest.approx((0.25 + 0.5 - 0.25) / 3)
    assert comparison.warnings == []


def test_different_problems_are_refused_and_named(tmp_path):
    a = result(tmp_path / "a", "A", {"x": [{"pass@1": 1.0}] * 3, "y": [{"pass@1": 0.0}]})
    b = result(tmp_path / "b", "B", {"x": [{"pass@1": 1.0}] * 2})
    for first, second in ((a, b), (b, a)):
        with pytest.raises(ValueError) as refusal:
            compare(first, second)
        assert f"{a} has 2 that {b} lacks (1 of x, 1 of y), e.g. 'problem 2'" in str(refusal.value)


def test_different_sampling_and_identical_models_cause_a_warning(tmp_path):
    problems = {"x": [{"pass@1": 1.0}]}
    a = result(tmp_path / "a", "A", problems, {"evaluation": {"temperature": 1.0}})
    b = result(tmp_path / "b", "A", problems, {"evaluation": {"temperature": 0.6}})
    first, second = compare(a, b / "result.json").warnings
    assert "`evaluation.temperature` is 1.0 of A and 0.6 of B" in first and "same model" in second


def test_files_that_are_no_results_and_results_without_a_common_measure_are_refused(tmp_path):
    a = result(tmp_path / "a", "A", {"x": [{"pass@1": 1.0}]})
    with pytest.raises(ValueError, match=r"no result\.json there"):
        compare(a, tmp_path)
    b = result(tmp_path / "b", "B", {"x": [{"avg@4": 1.0}]})
    with pytest.raises(ValueError, match=r"no measure in common"):
        compare(a, b)
