"""AReaL#1346, "mask 2d sequence advantages": the sequence-level loss averaged advantages over the padding.

The thread's example: mask [T, T, F, F], equal log-probs. Advantages [1, 1, 0, 0] give every trained token
the loss -1; with [1, 1, 10, 10], where only padding differs, it changed.
"""

import pytest
import torch

from grpo_dist.algorithms.aggregation import MODES, aggregate
from grpo_dist.algorithms.policy_losses import POLICY_LOSSES
from grpo_dist.policy.loss import batch_loss
from tests.support import made_groups
from tests.support.losses import change, objective

MASK = torch.tensor([[True, True, False, False]])
CLEAN, CONTAMINATED = torch.tensor([[1.0, 1, 0, 0]]), torch.tensor([[1.0, 1, 10, 10]])
OF_SEQUENCES = ("gspo", "gspo_segment", "gmpo")  # on-policy they are -A at every token
OTHERS_OF_SEQUENCES = ("kimi15", "topr", "reinforce_is", "vespo")
LOSSES = ("policy_gradient", "ppo_clip", "cispo", "sapo", "dppo_tv", "dppo_kl", "dro", "topr_token")
LOSSES += OF_SEQUENCES + OTHERS_OF_SEQUENCES


def test_the_bug_averages_advantages_over_padding():
    assert -CLEAN.mean(dim=1) == -0.5 and -CONTAMINATED.mean(dim=1) == -5.5
    masked = [(a * MASK).sum(dim=1) / MASK.sum(dim=1) for a in (CLEAN, CONTAMINATED)]
    assert masked == [1, 1]


@pytest.mark.parametrize("name", LOSSES)
def test_values_at_padding_change_neither_loss_nor_gradient(name):
    results = []
    for advantages in (CLEAN, CONTAMINATED):
        logprobs = torch.zeros(1, 4, requires_grad=True)
        losses, _ = POLICY_LOSSES[name](logprobs, torch.zeros(1, 4), advantages, MASK)
        loss = aggregate(losses, MASK, "seq-mean-token-mean", num_tokens=2, num_sequences=1, max_tokens=4)
        results.append((losses.tolist(), torch.autograd.grad(loss, logprobs)[0].tolist()))
    assert results[0] == results[1]
    assert results[0][1][0][2:] == [0, 0]
    if name in OF_SEQUENCES:
        assert results[0][0] == [[-1, -1, 0, 0]] and results[0][1] == [[-0.5, -0.5, 0, 0]]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OF_SEQUENCES + OTHERS_OF_SEQUENCES)
def test_a_wider_batch_has_the_same_loss(name, mode):
    """Compare rows alone, each at its own width, with all rows at the width of the longest."""
    batch = made_groups.batch(groups=3, samples=2, reference=False)
    settings = objective(loss=name, aggregation=mode)
    generator = torch.Generator().manual_seed(1)
    old = -torch.rand(batch.tokens.shape, generator=generator)
    new = old + 1e-4 * torch.randn(batch.tokens.shape, generator=generator)

    def loss_of(rows):
        part = batch.select(rows)
        width = part.tokens.shape[1]
        prepared = change(part, policy={"old_logprobs": old[rows, :width]})
        return float(batch_loss(new[rows, :width], prepared, settings)[0])

    apart = sum(loss_of([row]) for row in range(len(batch)))
    assert loss_of(list(range(len(batch)))) == pytest.approx(apart, rel=1e-5, abs=1e-7)
