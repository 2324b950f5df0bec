"""Tables of completions for trackers: the first whole groups of a step. Episodes are transcripts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_dist.batch.token_values import ValuesOfSamples
from grpo_dist.types import Group, Rollout

COLUMNS = ("uid", "sample", "prompt", "completion", "answer", "outcome", "reward", "advantage")
_TRAINED = "completions"  # the table of training samples
_ROWS = 64  # at most, unless one group is larger


@dataclass(frozen=True, slots=True)
class Table:
    """A table called completions, or completions/SET for an evaluation; rows follow `COLUMNS`."""

    name: str
    rows: tuple[tuple[Any, ...], ...]

    @property
    def is_evaluation(self) -> bool:
        """Return whether it has completions of an evaluation."""
        return self.name != _TRAINED


def table_of(name: str, groups: Sequence[Group], values: ValuesOfSamples | None) -> Table:
    """Make the table of the sample file ``name``: "step_000010" or "eval_SET_step_000010"."""
    before, _, _ = name.rpartition("step_")
    evaluated = before.removeprefix("eval_").removesuffix("_")
    count = max(1, _ROWS // max((len(g.rollouts) for g in groups), default=1))
    rows = tuple(row for group in groups[:count] for row in _rows(group, values or {}))
    return Table(f"{_TRAINED}/{evaluated}" if evaluated else _TRAINED, rows)


def transcript(rollout: Rollout) -> str:
    """Return the dialogue of an episode, turn by turn with tool results; else the completion.

    ```calculator
    347*58
    ```
    [calculator: ok, 0.012 s] 20126
    \\boxed{20126}
    """
    if not rollout.turns:
        return rollout.text
    parts = []
    for turn in rollout.turns:
        parts.append(turn.text)
        parts += [f"[{c.name}: {c.outcome}, {c.seconds:.3g} s] {c.result}" for c in turn.calls]
        text = said_besides(turn.observation, [call.result for call in turn.calls])
        parts += [f"[environment] {text}"] if text else []
    return "\n".join(parts)


def said_besides(observation: str, results: Sequence[str]) -> str:
    """Return the environment's text in an observation, after the tool results at its start."""
    prefix = "\n".join(results)
    return observation[len(prefix) :].lstrip("\n") if observation.startswith(prefix) else observation


def step_of(name: str) -> int:
    """Return the step of a sample file: "eval_SET_step_000010" -> 10."""
    return int(name.rpartition("_")[2])


def _rows(group: Group, values: ValuesOfSamples) -> Iterator[tuple[Any, ...]]:
    prompt = group.prompt
    for rollout, reward, outcome in zip(group.rollouts, group.rewards, group.outcomes, strict=True):
        sample_values = values.get((prompt.uid, rollout.sample))
        advantage = None if sample_values is None else sample_values.advantage
        scored = None if np.isnan(reward) else float(reward)
        yield (
            prompt.uid,
            rollout.sample,
            prompt.text,
            transcript(rollout),
            prompt.answer,
            outcome,
            scored,
            advantage,
        )
