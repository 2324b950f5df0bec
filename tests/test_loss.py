"""The loss of an update: nothing about how rows are split, ordered or padded may change its gradient."""

import dataclasses

import pytest
import samples_of_groups
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_dist.algorithms.aggregation import MODES
from grpo_dist.batching import micro_batches, shard
from grpo_dist.loss import LossSettings, add_stats, batch_loss, finish_stats

BATCH = samples_of_groups.batch(groups=3, samples=4)
OLD = dataclasses.replace(BATCH, old_logprobs=BATCH.rollout_logprobs + 0.1 * torch.randn(BATCH.tokens.shape))
POLICY = torch.where(BATCH.loss_mask, BATCH.rollout_logprobs + 0.3 * torch.randn(BATCH.tokens.shape), 0.0)
ENTROPY = torch.rand(BATCH.tokens.shape)


def whole(batch, settings, dtype=torch.float64):
    logprobs = POLICY.to(dtype).clone().requires_grad_()
    loss, stats = batch_loss(logprobs, as_type(batch, dtype), settings, entropy=ENTROPY.to(dtype))
    loss.backward()
    return float(loss.detach()), logprobs.grad, stats


def as_type(batch, dtype):
    floats = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    floats = {
        n: t.to(dtype) for n, t in floats.items() if isinstance(t, torch.Tensor) and t.is_floating_point()
    }
    return dataclasses.replace(batch, **floats)


def in_parts(batch, settings, parts, dtype=torch.float64):
    logprobs = POLICY.to(dtype).clone().requires_grad_()
    total, stats = 0.0, None
    for rows in parts:
        part = as_type(batch.select(rows), dtype)
        width = part.tokens.shape[1]
        entropy = ENTROPY.to(dtype)[rows, :width]
        loss, part_stats = batch_loss(logprobs[rows, :width], part, settings, entropy=entropy)
        loss.backward()
        total += float(loss.detach())
        stats = part_stats if stats is None else add_stats(stats, part_stats)
    return total, logprobs.grad, stats


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["none", "tis", "mis", "icepop"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_gradient_does_not_depend_on_the_split(mode, kind, level, estimator):
    how = LossSettings(
        aggregation=mode, kl_coef=0.1, kl_estimator=estimator, correction_kind=kind, correction_level=level,
        correction_low=0.5, correction_high=2.0, dual_clip=3.0, clip_high=0.28,
    )  # fmt: skip
    for batch in (BATCH, OLD):
        loss, gradient, stats = whole(batch, how)
        for parts in ([[i] for i in range(12)], [[11, 3, 5], [0, 1, 2, 4], [6, 7, 8, 9, 10]]):
            again, split_gradient, split_stats = in_parts(batch, how, parts)
            assert again == pytest.approx(loss, rel=1e-9)
            assert float((split_gradient - gradient).norm() / gradient.norm()) < 1e-9
            assert finish_stats(split_stats) == pytest.approx(finish_stats(stats), rel=1e-6)


@given(owners=st.lists(st.integers(0, 4), min_size=12, max_size=12))
@settings(max_examples=30, deadline=None)
def test_any_split_will_do_in_float32_too(owners):
    how = LossSettings(aggregation="seq-mean-token-mean", kl_coef=0.1, correction_kind="tis")
    parts = [[i for i, o in enumerate(owners) if o == k] for k in range(5)]
    _, gradient, _ = whole(OLD, how, torch.float32)
    _, split, _ = in_parts(OLD, how, [p for p in parts if p], torch.float32)
    assert float((split - gradient).norm() / gradient.norm()) < 1e-5


def test_on_policy_ratio_is_one_and_gradient_is_that_of_policy_gradient():
    how = LossSettings(aggregation="token-mean")
    _, gradient, stats = whole(BATCH, how)
    expected = -torch.where(BATCH.loss_mask, BATCH.advantages, 0.0) / BATCH.num_tokens
    assert torch.allclose(gradient.float(), expected)
    metrics = finish_stats(stats)
    assert metrics["policy/ratio_mean"] == metrics["policy/ratio_max"] == 1.0
    assert metrics["policy/approx_kl"] == 0.0


def test_correction_weighs_the_policy_loss_and_never_the_kl_term():
    """With all advantages 0 only the KL term is left, and weights of 0 (everything masked) must not touch it."""
    still = dataclasses.replace(BATCH, advantages=torch.zeros_like(BATCH.advantages))
    plain = whole(still, LossSettings(kl_coef=0.1))
    masked = whole(
        still, LossSettings(kl_coef=0.1, correction_kind="mis", correction_low=50.0, correction_high=60.0)
    )
    assert plain[0] == masked[0] and torch.equal(plain[1], masked[1])


def test_unscored_rows_and_padding_add_nothing():
    rng_batch = dataclasses.replace(BATCH, loss_mask=BATCH.loss_mask.clone())
    rng_batch.loss_mask[3] = False
    _, gradient, _ = whole(rng_batch, LossSettings(kl_coef=0.1))
    assert torch.equal(gradient[3], torch.zeros_like(gradient[3]))
    assert torch.equal(
        gradient[~rng_batch.loss_mask], torch.zeros(int((~rng_batch.loss_mask).sum())).double()
    )


def test_a_step_with_nothing_to_train_on_has_loss_and_gradient_zero():
    empty = dataclasses.replace(
        BATCH, loss_mask=torch.zeros_like(BATCH.loss_mask), num_tokens=0.0, num_sequences=0.0
    )
    for mode in MODES:
        loss, gradient, stats = whole(
            empty, LossSettings(aggregation=mode, kl_coef=0.1, correction_kind="tis")
        )
        assert loss == 0.0 and torch.equal(gradient, torch.zeros_like(gradient))
        assert all(value == value for value in finish_stats(stats).values())


def test_mismatch_is_measured_on_trained_tokens():
    shifted = torch.where(BATCH.loss_mask, BATCH.rollout_logprobs + 0.25, 123.0)
    _, stats = batch_loss(shifted.requires_grad_(), BATCH, LossSettings())
    metrics = finish_stats(stats)
    assert metrics["mismatch/logprob_diff_mean"] == pytest.approx(0.25, rel=1e-5)
    assert metrics["mismatch/logprob_diff_max"] == pytest.approx(0.25, rel=1e-5)


def test_ranks_and_micro_batches_together_cover_every_row_once():
    rows = BATCH.lengths.tolist()
    parts = shard(BATCH, 3)
    assert sorted(n for p in parts for n in p.lengths.tolist()) == sorted(rows)
    for part in parts:
        taken = [i for m in micro_batches(part.lengths.tolist(), 40) for i in m]
        assert sorted(taken) == list(range(len(part)))
