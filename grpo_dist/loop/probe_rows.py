"""What the engines sample for a sync probe, and the rows in which the policy computes its log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from grpo_dist.types import Group, Prompt, Rollout

RowKey = tuple[str, bytes, int | None]  # prompt, tokens, and the object with the routes


@dataclass(frozen=True, slots=True)
class ProbeSamples:
    """What ``engine`` sampled for each prompt of the probe; ``groups`` is empty if it was lost meanwhile."""

    engine: Any
    groups: list[tuple[Prompt, tuple[Rollout, ...]]]


def distinct_groups(sampled: Sequence[tuple[Prompt, tuple[Rollout, ...]]]) -> list[Group]:
    """Make one group per prompt, with each different completion once.

    Engines that agree bit by bit sample the same, so the policy's batch does not depend on their number.
    With `policy.router_replay` each has a row of its own, for the experts that this engine took. The
    engines' log-probs are replaced by 0: a batch drops samples with a NaN, and NaN is a difference to find.
    """
    prompts: dict[str, Prompt] = {}
    completions: dict[str, dict[RowKey, Rollout]] = {}
    for prompt, rollouts in sampled:
        prompts[prompt.uid] = prompt
        for rollout in rollouts:
            tokens = replace(rollout, logprobs=np.zeros_like(rollout.logprobs))
            completions.setdefault(prompt.uid, {}).setdefault(row_key(prompt, rollout), tokens)
    return [
        Group(prompts[uid], tuple(own.values()), np.zeros(len(own), np.float32), {}, ("",) * len(own))
        for uid, own in completions.items()
    ]


def rows_by_key(groups: Sequence[Group]) -> dict[RowKey, int]:
    """Return the row of each completion in the batch of ``groups``, by its `row_key`."""
    flat = [(group.prompt, rollout) for group in groups for rollout in group.rollouts]
    return {row_key(prompt, rollout): row for row, (prompt, rollout) in enumerate(flat)}


def row_key(prompt: Prompt, rollout: Rollout) -> RowKey:
    """Return what decides the policy's log-probs of ``rollout``, while its routes are in use."""
    routes = None if rollout.routes is None else id(rollout.routes)
    return prompt.uid, rollout.completion_ids.tobytes(), routes
