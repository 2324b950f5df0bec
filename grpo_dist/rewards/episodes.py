"""Rewards of episodes: the sum over their turns, and the reward of their outcome."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32

from grpo_dist.runtime.files import fields_of
from grpo_dist.types import Turn

Turns = Sequence[Mapping[str, Any]]  # of one episode, as `turns_for_rewards` makes them


def turns_for_rewards(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Return plain values for the functions of users, which run in processes without this package's types.

    [{"action": "2*3?", "observation": "6", "reward": None,
      "calls": [{"name": "calculator", "arguments": "2*3", "result": "6", "outcome": "ok", "seconds": 0.1}]}]
    """
    return [
        {
            "action": turn.text,
            "observation": turn.observation,
            "calls": [fields_of(call) for call in turn.calls],
            "reward": turn.reward,
        }
        for turn in turns
    ]


def sum_of_turns(turns: Turns) -> float:
    """Sum the rewards of the turns that have one; NaN where none has, or one could not be scored."""
    given = [turn["reward"] for turn in turns if turn["reward"] is not None]
    return math.fsum(given) if given and all(map(math.isfinite, given)) else math.nan


def reward_of_environment(turns: Turns, finish_reason: str, rewarded_ends: Collection[str]) -> float:
    """Return `sum_of_turns`; 0 for an episode without a reward that a budget ended, where
    `environments.outcome_rewards` has a reward for that outcome, which could not be added to NaN.
    """
    if finish_reason in rewarded_ends and turns and all(turn["reward"] is None for turn in turns):
        return 0.0
    return sum_of_turns(turns)


def failure_of(turns: Turns) -> str:
    """Return why the environment of an episode that ended with "error" failed."""
    return (turns[-1]["observation"] if turns else "") or "it failed"


def with_outcome_rewards(
    rewards: Float32[np.ndarray, " G"],
    finish_reasons: Sequence[str],
    turns: Sequence[Turns],
    added: Mapping[Any, float],
) -> Float32[np.ndarray, " G"]:
    """Return ``rewards`` with what `environments.outcome_rewards` adds to episodes."""
    more = [added.get(why, 0.0) if own else 0.0 for why, own in zip(finish_reasons, turns, strict=True)]
    return (rewards + np.array(more)).astype(np.float32)
