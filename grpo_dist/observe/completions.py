"""Tables of completions for trackers that show some: the first groups of a step, whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_dist.batch.token_values import ValuesOfSamples
from grpo_dist.types import Group

COLUMNS = ("uid", "sample", "prompt", "completion", "answer", "outcome", "reward", "advantage")
_ROWS = 64  # at most, where one group has not more
Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """``name``: completions, or completions/SET of an evaluation. Rows are as `COLUMNS`; None: not known."""

    name: str
    rows: tuple[Row, ...]


def table_of(name: str, groups: Sequence[Group], values: ValuesOfSamples | None) -> Table:
    """``name``: of the samples' file, "step_000010" or "eval_SET_step_000010"."""
    before, _, _ = name.rpartition("step_")
    evaluated = before.removeprefix("eval_").removesuffix("_")
    count = max(1, _ROWS // max((len(g.rollouts) for g in groups), default=1))
    rows = tuple(row for group in groups[:count] for row in _rows(group, values or {}))
    return Table(f"completions/{evaluated}" if evaluated else "completions", rows)


def step_of(name: str) -> int:
    """ "eval_SET_step_000010" -> 10."""
    return int(name.rpartition("_")[2])


def _rows(group: Group, values: ValuesOfSamples) -> Iterator[Row]:
    prompt = group.prompt
    for rollout, reward, outcome in zip(group.rollouts, group.rewards, group.outcomes, strict=True):
        known = values.get((prompt.uid, rollout.sample))
        advantage = None if known is None else known.advantage
        scored = None if np.isnan(reward) else float(reward)
        yield (
            prompt.uid, rollout.sample, prompt.text, rollout.text, prompt.answer, outcome, scored, advantage,
        )  # fmt: skip
