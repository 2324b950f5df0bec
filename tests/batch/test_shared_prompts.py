"""The share of prompts computed only once: the tokens that an update needs at least, P + sum R per group,
over the tokens that the ranks' micro-batches compute.
"""

from pathlib import Path

import numpy as np
import pytest

from grpo_dist.batch.rows import make_batch
from grpo_dist.batch.sharding import packed_micro_batches
from grpo_dist.batch.shared_prefixes import needed_tokens, shared_prefixes
from grpo_dist.config.files import load_config
from grpo_dist.policy.packing import _stream_indices
from grpo_dist.runtime.hardware import micro_batch_tokens
from grpo_dist.runtime.seeds import request_seed
from grpo_dist.tools.bench.lengths import lengths_of
from grpo_dist.types import Group, Prompt, Rollout
from tests.support.made_groups import shard

ROOT = Path(__file__).resolve().parents[2]
BENCHES = sorted((ROOT / "configs/bench").glob("*.yaml"))


def group_of(prompt, lengths):
    def rollout(i, n):
        ids, logprobs, versions = (np.zeros(n, dtype) for dtype in (np.int32, np.float32, np.int32))
        return Rollout(prompt.uid, i, ids, logprobs, "stop", "", versions)

    rollouts, size = tuple(rollout(i, n) for i, n in enumerate(lengths)), len(lengths)
    return Group(prompt, rollouts, np.zeros(size, np.float32), {}, ("",) * size)


def step_of(config, prompt_tokens, step):
    """Return the batch of a step with the bench's lengths; no two prompts share a prefix."""
    cap, groups = config.sampling.max_new_tokens, []
    for n in range(config.batch.prompts_per_step):
        prompt = Prompt(f"p{n}", np.full(prompt_tokens, n, np.int32), "", "made")
        seeds = [request_seed(0, step, prompt.uid, i) for i in range(config.batch.samples_per_prompt)]
        lengths = lengths_of(seeds, config.bench.lengths, cap=cap, uid=prompt.uid)
        groups.append(group_of(prompt, lengths))
    advantages = [np.ones(len(g.rollouts), np.float32) for g in groups]
    return make_batch(groups, advantages, ref_logprobs=None, max_new_tokens=cap)


def computed(batch, budget):
    """Count the tokens of the streams of a rank's micro-batches."""
    plan = packed_micro_batches(batch.lengths.tolist(), shared_prefixes(batch), budget)
    parts = (batch.select(rows) for rows in plan)
    streams = (_stream_indices(part.lengths.tolist(), shared_prefixes(part)) for part in parts)
    return sum(int(stream.max()) + 1 for stream in streams)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("path", BENCHES, ids=lambda path: path.stem)
def test_nine_tenths_of_the_shared_prompts_of_every_bench_are_computed_once(path, ranks):
    config = load_config(path, [])
    budget = micro_batch_tokens(config.batch.micro_batch_tokens, "cpu")
    for prompt_tokens in (8, config.data.max_prompt_tokens):
        for step in range(2):
            batch = step_of(config, prompt_tokens, step)
            completions = int((batch.lengths - batch.prompt_lengths).sum())
            least = completions + prompt_tokens * config.batch.prompts_per_step
            assert needed_tokens([batch]) == least
            share = least / sum(computed(part, budget) for part in shard(batch, ranks))
            assert 0.9 <= share <= 1.0, (prompt_tokens, step, share)


def test_a_prompt_longer_than_its_completions_is_computed_once_for_each_micro_batch():
    """Eight samples of 1 token after a prompt of 99: 107 tokens, or 2 x 99 + 8 in two micro-batches."""
    group = group_of(Prompt("p", np.zeros(99, np.int32), "", "made"), [1] * 8)
    batch = make_batch([group], [np.ones(8, np.float32)], ref_logprobs=None, max_new_tokens=1)
    assert computed(batch, 1000) == needed_tokens([batch]) == 99 + 8 and computed(batch, 103) == 2 * 99 + 8


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_prefix_of_several_prompts_is_needed_once(ranks):
    """16 prompts with the same 31 tokens before 8 different ones, 4 samples of 5 tokens each: 31 + 16 x
    (8 + 20) tokens; each further micro-batch or rank has the 31 once more.
    """
    groups = []
    for n in range(16):
        ids = np.r_[np.full(31, 99), np.full(8, n)].astype(np.int32)
        groups.append(group_of(Prompt(f"p{n}", ids, "", "made"), [5] * 4))
    batch = make_batch(groups, [np.ones(4, np.float32)] * 16, ref_logprobs=None, max_new_tokens=5)
    assert needed_tokens([batch]) == 31 + 16 * 28
    parts = shard(batch, ranks)
    assert sum(computed(part, 4000) for part in parts) <= 16 * 28 + 31 * ranks + 8 * (ranks - 1) * 2
