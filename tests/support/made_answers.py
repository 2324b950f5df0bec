"""Answers of one group, for tests of rewards that look at more than one text."""

import numpy as np

from grpo_dist.rewards.answers import Answers
from grpo_dist.rewards.combine import Term
from grpo_dist.rewards.registry import RewardSpec


def answers(completions, gold, *, columns=None, lengths=None, reasons=None, max_new_tokens=100) -> Answers:
    """``lengths``: tokens of each completion, all distinct; None: one per character."""
    lengths = [len(c) for c in completions] if lengths is None else lengths
    return Answers(
        completions=tuple(completions),
        token_ids=tuple(np.arange(n, dtype=np.int32) for n in lengths),
        finish_reasons=tuple(reasons or ["stop"] * len(completions)),
        gold=gold,
        columns=columns or {},
        max_new_tokens=max_new_tokens,
    )


def spec(name, function, weight=1.0, kwargs=None, *, gate=None, gate_above=0.0) -> RewardSpec:
    return RewardSpec(Term(name, weight, gate, gate_above), function, kwargs or {})
