"""Slow evidence, apart from `make test`: prompt pools reach the held-out accuracy of a uniform order with
at most 60 % of its sampled tokens. Five seeds of two runs, about 2 minutes each on two quiet cores.

First measurement, seed 0 alone, 2026-11-23: pools 90,777 tokens, mean of the three sets 51.2 % (add3 73.2 %
± 1.9); uniform 171,744 tokens, 50.5 % (add3 71.1 % ± 2.1).

make evidence ARGS=tests/evidence/test_pools_save_tokens.py
"""

import numpy as np
import pytest

from tests.evidence.learning_runs import train

pytestmark = [pytest.mark.evidence, pytest.mark.timeout(7 * 3600)]

SETS = ("add2", "add3", "add4")
T_95 = 2.776  # two-sided quantile of Student's t for four degrees of freedom


def result(*overrides):
    """Return the held-out accuracy, the mean over the three sets, and all sampled tokens."""
    lines, _ = train("configs/pools_demo.yaml", *overrides)
    last = [line for line in lines if "eval/add3/pass@1" in line][-1]
    tokens = sum(line.get("rollout/tokens", 0.0) for line in lines)
    return float(np.mean([last[f"eval/{name}/pass@1"] for name in SETS])), tokens


def test_pools_reach_the_accuracy_of_a_uniform_order_with_60_percent_of_its_tokens():
    pools = [result(f"seed={seed}") for seed in range(5)]
    uniform = [result(f"seed={seed}", "data.order=epochs", "steps=60") for seed in range(5)]
    shares = [own[1] / other[1] for own, other in zip(pools, uniform, strict=True)]
    gains = np.array([own[0] - other[0] for own, other in zip(pools, uniform, strict=True)])
    half = T_95 * gains.std(ddof=1) / np.sqrt(len(gains))
    print(f"tokens {np.mean(shares):.1%}, accuracy {gains.mean():+.1%} ± {half:.1%} (95 %)")
    assert max(shares) <= 0.6
    assert gains.mean() - half > -0.02
