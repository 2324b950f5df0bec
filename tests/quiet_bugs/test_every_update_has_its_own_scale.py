"""trl#6024, "correct DAPO/CISPO/VESPO loss normalization when steps_per_generation !=
gradient_accumulation_steps" (trl#5619): the loss of an optimiser update was divided by the tokens of all
samples that were drawn together, not by those of the update.

The thread's numbers: 4 parts drawn together and 2 to an update give half the gradient; 8 drawn and 32 to an
update give four times it.
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


def made(groups, tokens=6):
    """``groups`` of two samples of ``tokens`` each, every token with a loss of 1."""
    drawn = [group_of([1, 0], [tokens, tokens]) for _ in range(groups)]
    advantages = [np.full(2, -1.0, np.float32)] * groups
    return make_batch(drawn, advantages, ref_logprobs=None, max_new_tokens=tokens)


def loss(batch, **settings):
    logprobs = torch.full(batch.tokens.shape, -1.0)
    how = objective(loss="policy_gradient", **settings)
    return float(batch_loss(logprobs, batch, how)[0])


@pytest.mark.parametrize(("drawn", "in_update", "scale"), [(4, 2, 0.5), (8, 32, 4.0)])
def test_the_bug_divides_by_the_tokens_drawn_together(drawn, in_update, scale):
    tokens = 12  # of a part
    assert sum([tokens / (drawn * tokens)] * in_update) == scale


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_updates", [1, 2, 4])
def test_the_loss_of_each_update_has_the_scale_of_its_own_samples(mode, num_updates):
    whole = made(4)
    updates = split_updates(whole, num_groups=4, num_updates=num_updates)
    assert [loss(update, aggregation=mode) for update in updates] == [
        pytest.approx(loss(made(4 // num_updates), aggregation=mode))
    ] * num_updates


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("size", [1, 5])
def test_parts_of_an_update_add_up_to_it_however_many_they_are(ranks, size):
    """Completions of different lengths, on ranks, in micro-batches of ``size`` rows."""
    batch = made_groups.batch(groups=3, samples=4, reference=False)
    parts = [
        own.select(list(range(i, min(i + size, len(own)))))
        for own in shard(batch, ranks)
        for i in range(0, len(own), size)
    ]
    for mode in MODES:
        together = sum(loss(part, aggregation=mode) for part in parts)
        assert together == pytest.approx(loss(batch, aggregation=mode), rel=1e-5, abs=1e-6)
