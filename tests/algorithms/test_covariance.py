"""Clip-Cov, KL-Cov and their choice of tokens; adaptive entropy: numbers worked by hand."""

import math

import torch

from grpo_dist.algorithms.policy_losses import clip_cov, kl_cov
from grpo_dist.algorithms.selection import lowest, random_keys, token_covariances, up_to
from tests.support.numbers_by_hand import close, row

ONES = torch.ones(1, 4, dtype=torch.bool)


def on_row(loss, **how):
    new = row(-1.0, -1.0, -1.0, -1.0).requires_grad_()
    old = new.detach() - torch.log(row(1.1, 1.1, 3.0, 0.5))
    losses, stats = loss(new, old, row(2.0, 2.0, 2.0, -1.0), ONES, **how)
    (gradient,) = torch.autograd.grad(losses.sum(), new)
    return losses.detach(), gradient, int(stats["selected"])


def test_clip_cov_takes_the_loss_from_selected_tokens_and_clips_the_others():
    losses, gradient, count = on_row(clip_cov, selected=torch.tensor([[True, False, False, True]]))
    close(losses, row(0.0, -2.2, -2.4, 0.0), 1e-12)
    close(gradient, row(0.0, -2.2, 0.0, 0.0), 1e-12)
    assert count == 2


def test_kl_cov_adds_the_absolute_log_ratio_of_selected_tokens_and_clips_nothing():
    losses, gradient, count = on_row(
        kl_cov, selected=torch.tensor([[True, False, False, True]]), cov_kl_coef=0.5
    )
    close(losses, row(-2.2 + 0.5 * math.log(1.1), -2.2, -6.0, 0.5 + 0.5 * math.log(2)), 1e-12)
    close(gradient, row(-2.2 + 0.5, -2.2, -6.0, 0.5 - 0.5), 1e-12)
    assert count == 2


def test_covariances_are_products_of_differences_from_the_means_of_the_update():
    logprobs, advantages = row(-1.0, -3.0, -2.0, -9.0), row(1.0, -1.0, 3.0, 9.0)
    mask = torch.tensor([[True, True, True, False]])
    got = token_covariances(logprobs, advantages, mask, mean_logprob=-2.0, mean_advantage=1.0)
    close(got[0, :3], row(0.0, 2.0, 0.0)[0], 1e-12)
    assert got[0, 3] == -torch.inf


def test_the_lowest_are_as_many_as_asked_for_also_where_values_are_equal():
    values, ids = torch.tensor([3.0, 1.0, 1.0, 1.0, 2.0]), torch.tensor([4, 9, 7, 8, 1])
    for count, chosen in (
        (0, []),
        (1, [7]),
        (2, [7, 8]),
        (3, [7, 8, 9]),
        (4, [1, 7, 8, 9]),
        (9, [1, 4, 7, 8, 9]),
    ):
        last = lowest(values, ids, count)
        assert sorted(ids[up_to(values, ids, last)].tolist()) == chosen


def test_random_keys_depend_on_id_and_seed_alone_and_are_spread_evenly():
    ids = torch.arange(20_000)
    keys = random_keys(ids, 3)
    assert torch.equal(random_keys(ids.flip(0), 3).flip(0), keys)
    assert not torch.equal(random_keys(ids, 4), keys) and len(keys.unique()) == len(ids)
    assert float(keys.min()) >= 0 and float(keys.max()) < 1
    shares = torch.histc(keys.float(), bins=10, min=0, max=1) / len(ids)
    assert float((shares - 0.1).abs().max()) < 0.01
