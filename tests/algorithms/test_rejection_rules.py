"""Rules that drop tokens and sequences, the off-policy sequence mask, and weights over segments or divided by
their mean: numbers worked by hand.
"""

import math

import pytest
import torch

from grpo_dist.algorithms.offpolicy import (
    RULES,
    RejectionRule,
    accepted,
    correction,
    mean_weight_sums,
    off_policy_sequence_mask,
)
from grpo_dist.algorithms.ratios import segment_mean
from tests.support.numbers_by_hand import NAN, close, mask_of

# Log-ratios trainer - engine; the third row is masked but for its first token.
D = torch.tensor([[0.5, -1.0, 0.0], [0.1, 0.1, -0.1], [2.0, 9.0, 9.0]], dtype=torch.float64)
MASK = mask_of([3, 3, 1], 3)
ROLLOUT = torch.full_like(D, -3.0)


def kept(rule, high=None, low=None, **how):
    return accepted(ROLLOUT + D, ROLLOUT, MASK, [RejectionRule(rule, high, low)], **how).int().tolist()


ALL, NONE = [1, 1, 1], [0, 0, 0]


@pytest.mark.parametrize(
    ("rule", "high", "low", "expected"),
    [
        ("token_k1", math.exp(0.5), None, [ALL, ALL, NONE]),
        ("token_k1", None, 0.5, [[1, 0, 1], ALL, [1, 0, 0]]),  # exp(-1) is 0.37
        ("token_k2", 0.2, None, [[1, 0, 1], ALL, NONE]),  # 0.125, 0.5, 0; 2
        ("token_k3", 0.3, None, [[1, 0, 1], ALL, NONE]),  # 0.1487, 0.3679, 0; 4.39
        ("seq_sum_k1", 1.2, 0.7, [NONE, ALL, NONE]),  # products 0.607, 1.105, 7.39
        ("seq_mean_k1", 1.2, 0.8, [ALL, ALL, NONE]),  # geometric means 0.846, 1.034, 7.39
        ("seq_mean_k2", 0.21, None, [ALL, ALL, NONE]),  # 0.2083, 0.005, 2
        ("seq_sum_k2", 0.6, None, [NONE, ALL, NONE]),  # 0.625, 0.015, 2
        ("seq_max_k2", 0.5, None, [ALL, ALL, NONE]),
        ("seq_max_k3", 0.36, None, [NONE, ALL, NONE]),
        ("seq_mean_k3", 0.18, None, [ALL, ALL, NONE]),  # 0.1722
        ("token_tv", 0.03, None, [[0, 0, 1], ALL, NONE]),  # e^-3 is 0.0498: 0.0323, 0.0315, 0; 0.318
    ],
)
def test_each_rule_keeps_what_is_within_its_bounds(rule, high, low, expected):
    assert kept(rule, high, low) == (torch.tensor(expected) * MASK).tolist()


def test_the_gate_of_binary_kl_is_that_of_the_engine_to_the_trainer():
    p, q = math.exp(-3.0), math.exp(-2.5)
    exact = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    assert kept("token_binary_kl", exact * 1.0001)[0][0] == 1
    assert kept("token_binary_kl", exact * 0.9999)[0][0] == 0


def test_rules_combine_and_a_veto_drops_the_sequence():
    rules = [RejectionRule("token_k1", 1.2, 0.3), RejectionRule("seq_max_k2", 1.0)]
    both = accepted(ROLLOUT + D, ROLLOUT, MASK, rules)
    assert both.int().tolist() == [[0, 1, 1], [1, 1, 1], [0, 0, 0]]
    assert accepted(ROLLOUT + D, ROLLOUT, MASK, [], veto=0.4).int().tolist() == [NONE, ALL, [1, 0, 0]]
    assert torch.equal(accepted(ROLLOUT + D, ROLLOUT, MASK, []), MASK)


def test_masked_tokens_and_what_is_not_finite_decide_nothing_but_for_themselves():
    train, rollout = ROLLOUT + D, ROLLOUT.clone()
    train[2, 1:], rollout[0, 0] = NAN, NAN
    for rule in RULES:
        got = accepted(train, rollout, MASK, [RejectionRule(rule, 1e9)]).int().tolist()
        assert got[1] == ALL and got[2] == [1, 0, 0] and got[0][0] == 0, rule
        assert got[0][1:] == ([1, 1] if rule.startswith("token") else [0, 0]), rule


def test_an_unknown_rule_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="rejection rule 'seq_max_k1': expected one of token_k1, token_k2"):
        kept("seq_max_k1", 1.0)


def test_the_off_policy_mask_drops_bad_tokens_of_sequences_that_the_policy_has_left():
    """Mean of log p of the sampler minus the policy's: 1/6, -0.033 and -2."""
    advantages = torch.tensor([[-1.0, -1.0, 1.0], [-1.0, -1.0, -1.0], [-1.0, NAN, NAN]])
    for threshold, first in ((0.1, [0, 0, 1]), (0.2, [1, 1, 1])):
        got = off_policy_sequence_mask(ROLLOUT + D, ROLLOUT, advantages, MASK, threshold=threshold)
        assert got.int().tolist() == [first, ALL, [1, 0, 0]]


def test_segments_are_runs_of_sampled_tokens():
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 0], [1, 1, 0, 1, 0, 0, 0, 1]], dtype=torch.bool)
    values = torch.tensor([[9.0, 1, 3, 9, 2, 4, 6, 9], [5.0, 7, 9, 2, 9, 9, 9, 8]])
    expected = torch.tensor([[0.0, 2, 2, 0, 4, 4, 4, 0], [6.0, 6, 0, 2, 0, 0, 0, 8]])
    assert torch.equal(segment_mean(values, mask), expected)
    weights, _ = correction(
        values, torch.zeros_like(values), mask, kind="tis", level="segment", low=0, high=99
    )
    close(weights, torch.where(mask, expected.exp().clamp(max=99), 0.0), 1e-6)


@pytest.mark.parametrize(("level", "mean"), [("token", (1 + 2 + 2 + 4) / 4), ("sequence", (5 / 3 + 4) / 2)])
def test_the_mean_weight_is_over_tokens_or_over_sequences_and_adds_up_over_any_split(level, mean):
    weights = torch.tensor([[1.0, 2, 2], [4.0, NAN, NAN], [NAN, NAN, NAN]])
    mask = mask_of([3, 1, 0], 3)
    total, count = mean_weight_sums(weights, mask, level=level)
    assert total / count == pytest.approx(mean, rel=1e-12)
    parts = [mean_weight_sums(weights[i : i + 1], mask[i : i + 1], level=level) for i in range(3)]
    assert (sum(t for t, _ in parts), sum(c for _, c in parts)) == (pytest.approx(total), count)
