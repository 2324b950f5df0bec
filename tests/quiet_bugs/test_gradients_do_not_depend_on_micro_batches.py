"""verl at 1dda039, policy loss `geo_mean`: it averages over the rows of a micro-batch, and the micro-batches
are added up. On eight completions its gradient has norm 0.178 in one micro-batch and 0.710 in four: four
times as large.
"""

import pytest
import torch

from grpo_dist.algorithms.aggregation import MODES
from grpo_dist.algorithms.policy_losses import POLICY_LOSSES, gmpo
from grpo_dist.policy.loss import batch_loss
from tests.support import made_groups
from tests.support.losses import change, objective

BATCH = made_groups.batch(groups=2, samples=4, reference=False)


def log_probs():
    generator = torch.Generator().manual_seed(4)
    old = -3 * torch.rand(BATCH.tokens.shape, generator=generator)
    return old, (old + 0.05 * torch.randn(old.shape, generator=generator)).requires_grad_()


def gradient(size, **settings):
    """Return the gradient of all rows' log-probs, accumulated over micro-batches of ``size`` rows."""
    old, new = log_probs()
    for first in range(0, len(BATCH), size):
        rows = list(range(first, min(first + size, len(BATCH))))
        part = BATCH.select(rows)
        width = part.tokens.shape[1]
        prepared = change(part, policy={"old_logprobs": old[rows, :width]})
        loss, _ = batch_loss(new[rows, :width], prepared, objective(**settings))
        loss.backward()
    return new.grad


def gradient_of_the_bug(size):
    old, new = log_probs()
    for first in range(0, len(BATCH), size):
        part = slice(first, first + size)
        mask = BATCH.policy.mask[part]
        losses, _ = gmpo(new[part], old[part], BATCH.policy.advantages[part], mask)
        ((losses * mask).sum(dim=1) / mask.sum(dim=1)).mean().backward()
    return new.grad


def test_the_bug_is_four_times_as_large_in_four_micro_batches():
    one, four = gradient_of_the_bug(8), gradient_of_the_bug(2)
    torch.testing.assert_close(four, 4 * one, rtol=1e-4, atol=1e-7)
    assert one.norm() > 0


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_every_loss_has_one_gradient_under_every_aggregation(name):
    for mode in MODES:
        whole = gradient(8, loss=name, aggregation=mode)
        assert whole.any()
        parts = gradient(3, loss=name, aggregation=mode)
        torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-6)
