"""What the samples of a step need of a trainer: what their prompts begin with counts once.

A prompt computed for every sample is work that the result does not need: it counts neither in the operations
of `training/mfu`, nor in the loop that is the limit of training.
"""

from __future__ import annotations

import numpy as np

from grpo_dist.batch.shared_prefixes import begun_tokens
from grpo_dist.tools.bench.flops import Shape, training_flops
from grpo_dist.tools.bench.record import StepRecord


def needed_tokens(step: StepRecord) -> int:
    """Return the tokens of all completions, and those of all prompts with their common beginnings once."""
    completions = sum(r.tokens - len(r.prompt_ids) for r in step.requests)
    return completions + sum(size - begun for size, begun in _prompts(step))


def needed_flops(shape: Shape, step: StepRecord) -> float:
    """Return the operations of a forward and a backward pass over these tokens, each with all its context."""
    of_rows = training_flops(shape, [(r.tokens, r.length) for r in step.requests])
    repeated = training_flops(shape, [(len(r.prompt_ids), 0) for r in step.requests])
    prompts = _prompts(step)
    once = training_flops(shape, [(size, 0) for size, _ in prompts])
    return of_rows - repeated + once - training_flops(shape, [(begun, 0) for _, begun in prompts])


def _prompts(step: StepRecord) -> list[tuple[int, int]]:
    """Return of each distinct prompt its tokens, and how many it shares with the one before it in order."""
    prompts = [np.array(ids) for ids in {r.prompt_ids for r in step.requests}]
    return [(len(ids), begun) for ids, begun in zip(prompts, begun_tokens(prompts).tolist(), strict=True)]
