"""Log-probs of a frozen model for every row of every sample of a group."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from grpo_dist.batch.rows import context_ids
from grpo_dist.policy.attention import block_spans
from grpo_dist.policy.group_logprobs import group_logprobs
from grpo_dist.policy.micro_batches import MicroBatches
from grpo_dist.policy.model import TokenLogprobs, load_causal_lm
from grpo_dist.policy.packing import padded
from tests.support import made_groups

CPU = torch.device("cpu")


def loaded(path, packing):
    how = {"dtype": torch.float32, "attention": "auto", "trust_remote_code": False}
    return TokenLogprobs(load_causal_lm(path, packing=packing, **how), temperature=0.8, chunk_mib=1)


def tokens_of(group, row):
    """Return the number of context tokens of a row, and all its tokens [1, T]."""
    context = context_ids(group.prompt, row)
    return len(context), torch.from_numpy(np.concatenate([context, row.completion_ids])).long()[None]


@pytest.mark.parametrize("budget", [1, 60, 10_000])
@pytest.mark.parametrize("kernel", [None, block_spans], ids=["padded", "packed"])
def test_each_row_of_an_episode_has_the_log_probs_of_the_row_alone_and_0_for_observed_tokens(
    tiny_model, kernel, budget
):
    groups = made_groups.episode_groups(groups=2, rewritten=0.5)
    module, alone = loaded(str(tiny_model), kernel is not None), loaded(str(tiny_model), False)
    requests = [(g.prompt, g.rollouts) for g in groups]
    results = group_logprobs(module, requests, MicroBatches(budget, kernel, 1, CPU))
    for group, by_row in zip(groups, results, strict=True):
        rows = [row for r in group.rollouts for row in r.rows]
        assert len(by_row) == len(rows) > len(group.rollouts)
        for row, values in zip(rows, (taught.sampled for taught in by_row), strict=True):
            context, tokens = tokens_of(group, row)
            mask = torch.ones_like(tokens, dtype=torch.bool)
            with torch.no_grad():
                expected = alone(padded(tokens, mask))[0][0, context:].numpy()
            assert values.dtype == np.float32 and not values[~row.sampled].any()
            np.testing.assert_allclose(values[row.sampled], expected[row.sampled], atol=2e-5)


@pytest.mark.parametrize("kernel", [None, block_spans], ids=["padded", "packed"])
def test_samples_have_the_log_probs_of_the_temperature_that_they_were_drawn_at(tiny_model, kernel):
    """Also in one micro-batch with rows of other temperatures: a reference does not know steps."""
    module = loaded(str(tiny_model), kernel is not None)
    group = made_groups.group(0, np.random.default_rng(0))

    def at(*temperatures):
        rollouts = [replace(r, temperature=t) for r, t in zip(group.rollouts, temperatures, strict=True)]
        micro = MicroBatches(10_000, kernel, 1, CPU)
        return [taught.sampled for taught in group_logprobs(module, [(group.prompt, rollouts)], micro)[0]]

    hot, default, mixed = at(*[1.6] * 4), at(*[None] * 4), at(1.6, 0.8, 1.6, 0.8)
    for i in range(4):
        np.testing.assert_allclose(mixed[i], (hot, default)[i % 2][i], atol=1e-6)
        assert np.abs(hot[i] - default[i]).max() > 1e-3


@pytest.mark.parametrize("budget", [60, 10_000])
@pytest.mark.parametrize("kernel", [None, block_spans], ids=["padded", "packed"])
def test_the_top_k_tokens_of_a_row_are_those_of_the_row_alone(tiny_model, kernel, budget):
    groups = made_groups.episode_groups(groups=2, rewritten=0.5)
    module, alone = loaded(str(tiny_model), kernel is not None), loaded(str(tiny_model), False)
    requests = [(g.prompt, g.rollouts) for g in groups]
    micro = MicroBatches(budget, kernel, 1, CPU)
    with_top_k = group_logprobs(module, requests, micro, top_k=3)
    plain = group_logprobs(module, requests, micro)
    for group, by_row, plain_rows in zip(groups, with_top_k, plain, strict=True):
        rows = [row for r in group.rollouts for row in r.rows]
        for row, taught, values in zip(rows, by_row, plain_rows, strict=True):
            np.testing.assert_array_equal(taught.sampled, values.sampled)
            context, tokens = tokens_of(group, row)
            with torch.no_grad():
                logits = alone.model(tokens).logits[0, context - 1 : -1] / 0.8
            best = logits.log_softmax(-1).topk(3, dim=-1)
            assert taught.top_ids.dtype == np.int32 and taught.top.shape == (len(row.completion_ids), 3)
            np.testing.assert_array_equal(taught.top_ids[row.sampled], best.indices.numpy()[row.sampled])
            np.testing.assert_allclose(taught.top[row.sampled], best.values.numpy()[row.sampled], atol=2e-5)
