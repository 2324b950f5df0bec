"""The metrics of a step from those of its optimiser updates."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_dist.health.bounds import SKIPPED

_BEFORE_ANYTHING_MOVED = ("policy/ratio_mean", "policy/ratio_max", "ref/kl")  # shown of the first update


def step_metrics(
    per_update: Sequence[dict[str, float]], trained: Sequence[bool], *, unmoved: int
) -> dict[str, float]:
    """Return the mean of each metric over the updates that have it, the maximum where that is in the name.

    An update has no metrics of a stream without a token in it (`loss.finish_stats`): {nll 1, entropy 2} and
    {nll 5} -> {nll 3, entropy 2}. What every update has, such as the gradient's norm, is averaged over those
    that trained a token, unless none did. ``mismatch/*`` compares the engine with the trainer before anything
    moved, and ``first_update/*`` is of the first update.

    Args:
        per_update: at least one.
        trained: whether each update had a token of any stream.
        unmoved: how many of them, from the first, have log-probs of the weights before the step.
    """
    first = per_update[0]
    means = [own for own, had_tokens in zip(per_update, trained, strict=True) if had_tokens] or per_update
    metrics = {}
    for name in dict.fromkeys(name for own in per_update for name in own):
        some = means
        if name.startswith("mismatch/"):
            some = per_update[:unmoved]
        elif name.endswith("_max") or name == SKIPPED:
            some = per_update
        if values := [own[name] for own in some if name in own]:
            metrics[name] = _reduced(name, values)
    return metrics | {f"first_update/{k}": first[k] for k in _BEFORE_ANYTHING_MOVED if k in first}


def _reduced(name: str, values: Sequence[float]) -> float:
    if name == SKIPPED:
        return sum(values)
    return max(values) if name.endswith("_max") else sum(values) / len(values)
