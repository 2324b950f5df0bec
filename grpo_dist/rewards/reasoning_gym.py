"""reasoning-gym's scorers as a reward, for sources with the path `reasoning_gym:<task>`:

rewards: {functions: [{function: "grpo_dist.rewards.reasoning_gym:score"}]}

It runs like a user's function, in the graders' processes with their time and memory limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_dist.environments.reasoning_gym import score_answer


def score(completion: str, reasoning_gym: Mapping[str, Any]) -> float:
    """Return the task's score of the answer in ``completion``, 0 to 1.

    ``reasoning_gym``: the column with the package's entry for the problem.
    """
    return score_answer(completion, reasoning_gym)
