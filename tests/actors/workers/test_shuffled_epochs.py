"""Real ranks: the reshuffled updates of later epochs are the same on one rank and on two."""

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_dist.batch.rows import shuffle_updates, split_updates
from grpo_dist.config import AlgorithmConfig, KLConfig
from tests.support import made_groups
from tests.support.losses import change
from tests.support.real_ranks import comparable, flat, on_all, relative, running

pytestmark = pytest.mark.slow

# Share of the distance moved. Adam divides by the size of a gradient, so rounding shows where it is nearly 0.
SAME = 1e-2

HOW = {
    "old log-probs and a normalised correction": AlgorithmConfig(
        correction={"normalize": True}, aggregation="prompt-mean-token-mean"
    ),
    "the tokens of highest entropy": AlgorithmConfig(top_entropy_share=0.4, kl=KLConfig()),
}


@pytest.mark.parametrize("name", HOW)
def test_two_ranks_train_on_the_updates_of_one_in_every_epoch(forked_ranks, tiny_model, name):
    """Three epochs of two updates; values that depend on a whole update come from the reshuffled one."""
    batch = made_groups.batch(groups=4, samples=3, reference=False)
    noise = torch.randn(batch.tokens.shape, generator=torch.Generator().manual_seed(1))
    engine = torch.where(batch.policy.mask, -6 + 0.1 * noise, 0.0)
    batch = change(batch, policy={"rollout_logprobs": engine})
    updates = split_updates(batch, num_groups=4, num_updates=2)
    later = [shuffle_updates(batch, num_groups=4, num_updates=2, seed=seed) for seed in (1, 4)]
    firsts = [set(u.row_ids.tolist()) for u in updates]
    assert any({*u.row_ids.tolist()} not in firsts for epoch in later for u in epoch)

    async def step(later_epochs, **how):
        async with running(tiny_model, algorithm=HOW[name], epochs=3, **how) as group:
            metrics = await group.update(group.stage(updates, later_epochs=later_epochs))
            weights = (await on_all(group, "weights"))[0]
        return metrics, weights

    one, weights = asyncio.run(step(later, ranks=1, stage=0))
    two, same = asyncio.run(step(later, ranks=2, stage=3, micro_batch_tokens=40))
    _, as_before = asyncio.run(step((), ranks=1, stage=0))
    first = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    before = flat({n: p.detach() for n, p in first.named_parameters()})
    moved, moved_too = flat(weights) - before, flat(same) - before
    assert relative(moved_too, moved) < SAME
    assert comparable(two) == pytest.approx(comparable(one), rel=1e-3, abs=1e-5)
    assert relative(flat(as_before) - before, moved) > SAME  # other updates, other weights
