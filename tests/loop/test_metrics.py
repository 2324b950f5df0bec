"""Metrics of a batch, worked by hand."""

from dataclasses import replace

import numpy as np
import pytest

from grpo_dist.loop.metrics import rollout_metrics
from tests.support.made_groups import group

NAN = float("nan")


def test_every_reward_part_logs_its_mean_and_its_unscored_samples():
    rng = np.random.default_rng(0)
    parts = [{"math": [1, 0, NAN, 1], "judge": [NAN] * 4}, {"math": [0, 0, 1, NAN], "judge": [NAN] * 4}]
    groups = [
        replace(
            group(i, rng, rewards=own["math"]),
            reward_parts={name: np.array(values, np.float32) for name, values in own.items()},
        )
        for i, own in enumerate(parts)
    ]
    metrics = rollout_metrics(groups, version=0)
    assert metrics["reward/math"] == pytest.approx(3 / 6) and metrics["reward/math_unscored"] == 2.0
    assert np.isnan(metrics["reward/judge"]) and metrics["reward/judge_unscored"] == 8.0
    assert metrics["reward/mean"] == pytest.approx(3 / 6) and metrics["reward/unscored"] == 2.0
