"""Turns, tool calls and ends of the episodes of an evaluation: counted per sample, then over problems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_dist.evaluation.estimates import Estimate, estimate
from grpo_dist.evaluation.sampling import is_missing
from grpo_dist.types import Rollout


@dataclass(frozen=True, slots=True)
class CountedEpisodes:
    """Of one problem, a number or a text per sample. One that the engines gave up is no episode.

    Attributes:
        turns: actions of the policy.
        calls: tool calls.
        errors: those of them that did not end ``ok``.
        ends: finish reasons.
    """

    turns: tuple[int, ...]
    calls: tuple[int, ...]
    errors: tuple[int, ...]
    ends: tuple[str, ...]

    @classmethod
    def of(cls, rollouts: Sequence[Rollout]) -> CountedEpisodes | None:
        """Count; None for samples without an environment."""
        if not any(rollout.turns for rollout in rollouts):
            return None
        drawn = [rollout for rollout in rollouts if not is_missing(rollout)]
        calls = [[call for turn in rollout.turns for call in turn.calls] for rollout in drawn]
        return cls(
            turns=tuple(len(rollout.turns) for rollout in drawn),
            calls=tuple(map(len, calls)),
            errors=tuple(sum(call.outcome != "ok" for call in own) for own in calls),
            ends=tuple(rollout.finish_reason for rollout in drawn),
        )


@dataclass(frozen=True, slots=True)
class EpisodeFigures:
    """Of several problems.

    Attributes:
        episodes: samples of an environment.
        turns: actions of an episode, mean.
        tool_calls: of an episode, mean.
        tool_call_share: of episodes, those with a tool call; the interval is over problems.
        tool_error_share: of calls, those that did not end ``ok``; 0 without calls.
        ends: share of episodes by finish reason; reasons that do not occur are left out.
    """

    episodes: int
    turns: float
    tool_calls: float
    tool_call_share: Estimate
    tool_error_share: float
    ends: dict[str, float]

    @classmethod
    def of(cls, counts: Sequence[CountedEpisodes]) -> EpisodeFigures | None:
        """Summarise; None for no counts.

        Two problems with calls (0, 2) and (1, 1) have 1 call an episode; 3 of 4 episodes have one.
        """
        if not counts:
            return None
        count = sum(len(own.turns) for own in counts)
        calls = sum(sum(own.calls) for own in counts)
        ends = Counter(end for own in counts for end in own.ends)
        shares = [float(np.mean([n > 0 for n in own.calls])) for own in counts]
        return cls(
            episodes=count,
            turns=sum(sum(own.turns) for own in counts) / count,
            tool_calls=calls / count,
            tool_call_share=estimate(shares, samples=count),
            tool_error_share=sum(sum(own.errors) for own in counts) / max(calls, 1),
            ends={end: number / count for end, number in sorted(ends.items())},
        )
