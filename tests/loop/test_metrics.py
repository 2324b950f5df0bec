"""Metrics of a batch, computed by hand."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_dist.batch.sharding import COMPUTED_TOKENS
from grpo_dist.loop.metrics import rollout_metrics, sampling_cost, trained_metrics
from grpo_dist.types import FurtherRow, Rollout, ToolCall, Turn, count_signals, has_signal
from tests.support.made_groups import group, group_of

NAN = float("nan")


def test_every_reward_part_logs_its_mean_and_its_unscored_samples():
    rng = np.random.default_rng(0)
    by_group = [{"math": [1, 0, NAN, 1], "judge": [NAN] * 4}, {"math": [0, 0, 1, NAN], "judge": [NAN] * 4}]
    groups = [
        replace(
            group(i, rng, rewards=parts["math"]),
            reward_parts={name: np.array(values, np.float32) for name, values in parts.items()},
        )
        for i, parts in enumerate(by_group)
    ]
    metrics = rollout_metrics(groups, version=0)
    assert metrics["reward/math"] == pytest.approx(3 / 6) and metrics["reward/math_unscored"] == 2.0
    assert np.isnan(metrics["reward/judge"]) and metrics["reward/judge_unscored"] == 8.0
    assert metrics["reward/mean"] == pytest.approx(3 / 6) and metrics["reward/unscored"] == 2.0


def rollout(sample, marks, reason="stop", turns=(), *, version=5, further=()):
    """Build a rollout. ``marks``: a is a sampled token of ``version``, o a given one."""
    sampled = np.array([c == "a" for c in marks])
    versions = np.where(sampled, version, -1).astype(np.int32)
    ids, logprobs = np.zeros(len(marks), np.int32), np.full(len(marks), np.nan, np.float32)
    logprobs[sampled] = -1.0
    return Rollout("p", sample, ids, logprobs, reason, "", versions, sampled, tuple(turns), tuple(further))


def turn(*outcomes, seconds=1.0):
    return Turn(0, 1, "", calls=tuple(ToolCall("python", "", "", o, seconds) for o in outcomes))


def test_given_tokens_are_neither_stale_nor_sampled_and_ends_of_episodes_are_shares():
    """A version of -1 would be a staleness of 8 here, and a NaN a lost sample."""
    late = rollout(0, "aooa", version=7)
    row = FurtherRow(np.zeros(9, np.int32), late.completion_ids, late.logprobs, late.policy_versions,
                     late.sampled)  # fmt: skip
    base = group_of([1, 0, 1, 0, 0], [3] * 5)
    plain = base.rollouts[4]
    rollouts = (
        rollout(0, "aao", "stop", [turn("ok", seconds=0.5), turn("error", seconds=3.5)], further=[row]),
        rollout(1, "ooa", "turns", [turn("ok", "timeout")]),
        rollout(2, "a", "stop", [turn()]),
        rollout(3, "a", "error", [turn()]),
        replace(plain, policy_versions=np.full(3, 7, np.int32)),
    )
    metrics = rollout_metrics([replace(base, rollouts=rollouts)], version=7)
    assert metrics["rollout/staleness_max"] == 2.0 and metrics["rollout/nan_logprobs"] == 0.0
    assert metrics["rollout/staleness_mean"] == pytest.approx(2 * 5 / 10)
    assert metrics["rollout/tokens"] == 10.0
    assert metrics["rollout/length_tokens"] == pytest.approx((7 + 3 + 1 + 1 + 3) / 5)
    assert metrics["episode/turns"] == 5 / 4 and metrics["episode/rows"] == 5 / 4
    assert metrics["episode/rewritten"] == 1 / 4
    assert metrics["episode/given_share"] == pytest.approx(5 / 12)
    assert metrics["episode/tool_calls"] == 1.0 and metrics["episode/tool_error_share"] == 0.5
    ends = {
        name.rpartition("/")[2]: value for name, value in metrics.items() if name.startswith("episode/end")
    }
    assert ends == {"stop": 0.5, "length": 0.0, "turns": 0.25, "tool_limit": 0.0, "error": 0.25}
    assert metrics["time/tool_call_mean_s"] == pytest.approx((0.5 + 3.5 + 1 + 1) / 4)
    assert metrics["time/tool_call_p95_s"] == pytest.approx(3.5 - 0.15 * 2.5)


def test_a_log_prob_that_is_not_finite_counts_its_sample_once_and_is_in_no_mean():
    base = group_of([1, 0, 1], [2, 3, 4])
    logprobs = ([-1.0, -2.0], [np.nan, -np.inf, -3.0], [-4.0, -4.0, -4.0, -4.0])
    versions = ([3, 3], [3, 3, 2], [1, 1, 1, 4])
    zipped = zip(base.rollouts, logprobs, versions, strict=True)
    rollouts = tuple(
        replace(rollout, logprobs=np.float32(p), policy_versions=np.int32(v)) for rollout, p, v in zipped
    )
    metrics = rollout_metrics([replace(base, rollouts=rollouts)], version=3)
    assert metrics["rollout/nan_logprobs"] == 1.0
    assert metrics["rollout/entropy"] == (1 + 2 + 3 + 16) / 7
    assert metrics["rollout/staleness_mean"] == (0 + 0 + 0 + 0 + 1 + 2 + 2 + 2 - 1) / 9
    assert metrics["rollout/staleness_max"] == 2.0


@pytest.mark.parametrize(
    ("rewards", "signals"),
    [
        ([[1, 1], [0, 1], [NAN, 1], [NAN, 1, 0], [NAN, NAN]], 2),
        ([[np.inf, np.inf], [-np.inf, np.inf], [0.0, -0.0], [0.7, 0.7, 0.7], [5]], 1),
        ([], 0),
    ],
)
def test_groups_with_a_signal_are_counted_as_one_by_one(rewards, signals):
    groups = [replace(group_of([0], [1]), rewards=np.array(r, np.float32)) for r in rewards]
    assert count_signals(groups) == sum(has_signal(g.rewards) for g in groups) == signals


def test_the_cost_of_a_step_by_hand():
    """One of the two groups of the batch is trained; a third was discarded."""
    groups = [group_of([0, 1], [2, 4]), group_of([1, 1], [3, 3])]
    discarded = [group_of([0, 0, 0], [1, 1, 4])]
    assert sampling_cost(groups, discarded, {0}) == {
        "group/extra_prompts": 1.0,
        "group/samples_per_trained": 3.5,
    }
    assert sampling_cost(groups, [], set()) == {"group/extra_prompts": 0.0}


def test_the_packing_efficiency_is_the_share_of_the_computed_tokens_that_are_needed():
    """A prompt of 99 tokens with eight completions of 1, computed in two micro-batches."""
    staged = SimpleNamespace(rows=8, tokens=800, needed_tokens=99 + 8.0, loss_tokens=8)
    counts = {"train/loss_tokens": 8.0, "train/rows": 8.0, "train/tokens": 800.0}
    update = {COMPUTED_TOKENS: 2 * 99 + 8.0}
    packed = counts | {"throughput/packing_efficiency": 107 / 206}
    assert trained_metrics(staged, update, trained=True) == packed
    assert trained_metrics(staged, {}, trained=True) == counts
    assert trained_metrics(staged, update, trained=False) == {"train/loss_tokens": 0.0}
