"""trl#6024, "correct DAPO/CISPO/VESPO loss normalization when steps_per_generation !=
gradient_accumulation_steps" (trl#5619): the loss of an optimiser update was divided by the tokens of all
samples of one generation, not by the tokens of the update.

The thread's numbers: 4 parts per generation and 2 per update give half the gradient; 8 per generation and
32 per update give four times the gradient.
"""

import numpy as np
import pytest
import torch

from grpo_dist.algorithms.aggregation import MODES
from grpo_dist.batch.rows import make_batch, split_updates
from grpo_dist.policy.loss import batch_loss
from tests.support import made_groups
from tests.support.losses import objective
from tests.support.made_groups import group_of, shard


def batch_of(groups, tokens=6):
    """Return a batch of ``groups`` of two samples with ``tokens`` each; every token has a loss of 1."""
    samples = [group_of([1, 0], [tokens, tokens]) for _ in range(groups)]
    advantages = [np.full(2, -1.0, np.float32)] * groups
    return make_batch(samples, advantages, ref_logprobs=None, max_new_tokens=tokens)


def loss(batch, **settings):
    logprobs = torch.full(batch.tokens.shape, -1.0)
    how = objective(loss="policy_gradient", **settings)
    return float(batch_loss(logprobs, batch, how)[0])


@pytest.mark.parametrize(("generated", "in_update", "scale"), [(4, 2, 0.5), (8, 32, 4.0)])
def test_the_bug_divides_by_the_tokens_drawn_together(generated, in_update, scale):
    tokens = 12  # per part
    assert sum([tokens / (generated * tokens)] * in_update) == scale


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_updates", [1, 2, 4])
def test_the_loss_of_each_update_has_the_scale_of_its_own_samples(mode, num_updates):
    whole = batch_of(4)
    updates = split_updates(whole, num_groups=4, num_updates=num_updates)
    assert [loss(update, aggregation=mode) for update in updates] == [
        pytest.approx(loss(batch_of(4 // num_updates), aggregation=mode))
    ] * num_updates


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("size", [1, 5])
def test_any_split_of_an_update_adds_up_to_it(ranks, size):
    """Completions of different lengths, in micro-batches of ``size`` rows per rank."""
    batch = made_groups.batch(groups=3, samples=4, reference=False)
    parts = [
        rows.select(list(range(i, min(i + size, len(rows)))))
        for rows in shard(batch, ranks)
        for i in range(0, len(rows), size)
    ]
    for mode in MODES:
        together = sum(loss(part, aggregation=mode) for part in parts)
        assert together == pytest.approx(loss(batch, aggregation=mode), rel=1e-5, abs=1e-6)
