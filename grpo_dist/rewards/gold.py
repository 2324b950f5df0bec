"""Counts gold answers that the math grader cannot parse, before a run starts."""

from __future__ import annotations

import re
from collections.abc import Sequence

from grpo_dist.config import RewardsConfig
from grpo_dist.rewards.pool import GraderPool
from grpo_dist.runtime.hardware import available_cpus

_NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?")  # always parsable; most data sets hold nothing else
_LOOKED_AT = 1000  # enough to detect a wrong column, in seconds even for hard formulas


def count_unreadable(golds: Sequence[str], settings: RewardsConfig) -> tuple[int, int]:
    """Count gold answers that can only be compared as text. Returns (unreadable, examined).

    Examines all plain numbers and the first thousand other answers, in grader processes with the deadline of
    an answer, because some texts hang a parser.
    """
    formulas = [gold for gold in golds if not _NUMBER.fullmatch(gold)]
    asked = formulas[:_LOOKED_AT]
    looked_at = len(golds) - len(formulas) + len(asked)
    if not asked:
        return 0, looked_at
    processes = min(available_cpus(), len(asked))
    with GraderPool(processes, timeout_s=settings.timeout_s, memory_mb=settings.memory_mb) as pool:
        readable = pool.call("grpo_dist.rewards.math:gold_is_parsable", [{"answer": gold} for gold in asked])
    return sum(value != 1.0 for value in readable), looked_at
