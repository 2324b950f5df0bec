"""Metrics of one step. Names carry the unit.

Names of metrics that depend on the clock or the machine start with `time/`, `throughput/` or `memory/`, so
that two runs can be compared without them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from grpo_dist.batch.rows import has_logprobs
from grpo_dist.types import Group, has_signal

OUTCOMES = ("correct", "wrong", "no_answer", "timeout", "error")


def rollout_metrics(groups: list[Group], *, version: int) -> dict[str, float]:
    """Compute rewards, lengths, outcomes and staleness of the groups that a step sampled.

    ``version``: the policy's before the update; a token sampled at that version has staleness 0.
    """
    rewards = np.concatenate([g.rewards for g in groups]).astype(np.float64)
    scored = rewards[np.isfinite(rewards)]
    lengths = np.array([len(r.completion_ids) for g in groups for r in g.rollouts])
    reasons = Counter(r.finish_reason for g in groups for r in g.rollouts)
    staleness = version - np.concatenate([r.policy_versions for g in groups for r in g.rollouts])
    metrics = {
        "reward/mean": float(scored.mean()) if len(scored) else float("nan"),
        "reward/std": float(scored.std()) if len(scored) else float("nan"),
        "reward/unscored": float(len(rewards) - len(scored)),
        "group/no_signal_share": float(np.mean([not has_signal(g.rewards) for g in groups])),
        "rollout/length_tokens": float(lengths.mean()),
        "rollout/length_max_tokens": float(lengths.max()),
        "rollout/truncated_share": reasons["length"] / len(lengths),
        "rollout/nan_logprobs": float(sum(not has_logprobs(r) for g in groups for r in g.rollouts)),
        "rollout/garbage_share": sum(g.garbage for g in groups) / len(lengths),
        "rollout/tokens": float(lengths.sum()),
        "rollout/staleness_mean": float(staleness.mean()) if len(staleness) else 0.0,
        "rollout/staleness_max": float(staleness.max(initial=0)),
    }
    for name in groups[0].reward_parts:
        part = np.concatenate([g.reward_parts[name] for g in groups]).astype(np.float64)
        known = part[np.isfinite(part)]
        metrics[f"reward/{name}"] = float(known.mean()) if len(known) else float("nan")
        metrics[f"reward/{name}_unscored"] = float(len(part) - len(known))
    outcomes = Counter(o for g in groups for o in g.outcomes if o)
    if outcomes:
        metrics |= {f"outcome/{o}": float(outcomes[o]) for o in OUTCOMES}
    return metrics


def throughput_metrics(groups: Sequence[Group], times: dict[str, float]) -> dict[str, float]:
    """Return ``times``, seconds of one step by `Stopwatch`, and tokens and samples per second."""
    completion = sum(len(r.completion_ids) for g in groups for r in g.rollouts)
    prompts = sum(len(g.prompt.token_ids) * len(g.rollouts) for g in groups)
    samples = sum(len(g.rollouts) for g in groups)
    return times | {
        "throughput/completion_tokens_per_s": completion / times["time/step_s"],
        "throughput/tokens_per_s": (completion + prompts) / times["time/step_s"],
        "throughput/samples_per_s": samples / times["time/step_s"],
    }
