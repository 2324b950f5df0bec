"""Verdicts on the problems of an evaluation: graded samples, and which of them gave the same answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from threading import Lock
from typing import Any

import numpy as np

from grpo_dist.config import RewardsConfig
from grpo_dist.evaluation.votes import final_answers, numbered
from grpo_dist.rewards.pool import GraderPool
from grpo_dist.rewards.text import boxes
from grpo_dist.rewards.thought import final_text, in_plain_tags, outside_thought, thought_for
from grpo_dist.tools.evaluate.episodes import CountedEpisodes
from grpo_dist.types import Group, Prompt, correctness

_SHOWN = 200  # characters of an answer to keep


@dataclass(frozen=True, slots=True)
class Verdict:
    """The graded samples of one problem.

    ``correct`` has 1, 0 or None (unscored) per sample. ``numbers`` has one number per distinct answer, -1 for
    no answer; it is None for a single sample, and where neither the math grader nor a judge ran.
    ``episodes`` is None for samples without an environment, and in records from before they were counted;
    ``timeouts`` is 0 in those.
    """

    key: str
    uid: str
    correct: tuple[float | None, ...]
    numbers: tuple[int, ...] | None
    answers: tuple[str, ...]
    lengths: tuple[int, ...]  # tokens of each completion; 0 for a sample that was given up
    truncated: int  # truncated samples
    episodes: CountedEpisodes | None = None
    timeouts: int = 0  # samples that the math grader did not judge in time

    @property
    def is_final(self) -> bool:
        """Whether the same samples would have this verdict again. Where none was scored, an engine or a judge
        may have been down; a grader that ran out of time would do so again.
        """
        return any(c is not None for c in self.correct) or self.timeouts == len(self.correct)

    @property
    def flags(self) -> np.ndarray:
        """float64 [samples], NaN for unscored ones."""
        return np.array([np.nan if c is None else c for c in self.correct])

    @property
    def drawn_lengths(self) -> list[int]:
        """Tokens of each completion that was not given up; one that the graders know is there, even empty."""
        return [n for n, c in zip(self.lengths, self.correct, strict=True) if n or c is not None]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Verdict:
        own = {name: _frozen(value) for name, value in row.items()}
        if own.get("episodes") is not None:
            own["episodes"] = CountedEpisodes(**{k: _frozen(v) for k, v in row["episodes"].items()})
        return cls(**own)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def key_of(prompt: Prompt) -> str:
    """Return a digest of the tokens of the prompt, its environment, and all that rewards see of it."""
    parts: list[Any] = [prompt.uid, prompt.answer, dict(prompt.columns)]
    if prompt.task is not None:
        parts += [prompt.task.environment, dict(prompt.task.kwargs)]
    seen = json.dumps(parts, default=str, sort_keys=True)
    digest = hashlib.blake2b(seen.encode(), digest_size=12)
    digest.update(np.asarray(prompt.token_ids, np.int32).tobytes())
    return digest.hexdigest()


class VerdictMaker:
    """Grades groups into verdicts. Thread-safe; a context manager whose processes start on first use."""

    def __init__(self, rewards: RewardsConfig) -> None:
        self._rewards, self._lock = rewards, Lock()
        self._made: GraderPool | None = None

    def __enter__(self) -> VerdictMaker:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._made is not None:
            self._made.close()

    def verdicts(self, groups: Sequence[Group]) -> list[Verdict]:
        return [self._verdict(group) for group in groups]

    def _verdict(self, group: Group) -> Verdict:
        found = correctness(group)
        correct = [None if np.isnan(c) else float(c) for c in found]
        comparable = len(correct) > 1 and any(group.outcomes)
        answers = self._answers(group) if comparable else []
        numbers = numbered(answers, found.tolist(), self._pool) if comparable else None
        return Verdict(
            key=key_of(group.prompt),
            uid=group.prompt.uid,
            correct=tuple(correct),
            numbers=None if numbers is None else tuple(numbers),
            answers=tuple(answer[:_SHOWN] for answer in answers),
            lengths=tuple(r.num_tokens for r in group.rollouts),
            truncated=sum(r.finish_reason == "length" for r in group.rollouts),
            episodes=CountedEpisodes.of(group.rollouts),
            timeouts=sum(outcome == "timeout" for outcome in group.outcomes),
        )

    def _answers(self, group: Group) -> list[str]:
        """Return each sample's answer. Only wrong ones without a box need a search: right ones are equal."""
        thought = thought_for(group.prompt.thought, self._rewards)
        texts = [in_plain_tags(outside_thought(r.text, thought), thought) for r in group.rollouts]
        wrong = [i for i, outcome in enumerate(group.outcomes) if outcome == "wrong"]
        found = dict(zip(wrong, final_answers([texts[i] for i in wrong], self._pool), strict=True))
        known = {"correct": lambda text: (boxes(final_text(text)) or [group.prompt.answer])[-1]}
        return [
            found[i] if i in found else known.get(outcome, lambda _: "")(texts[i])
            for i, outcome in enumerate(group.outcomes)
        ]

    def _pool(self) -> GraderPool:
        with self._lock:
            if self._made is None:
                own = self._rewards
                self._made = GraderPool(
                    own.processes_per_worker,
                    timeout_s=own.timeout_s,
                    memory_mb=own.memory_mb,
                    accept_arithmetic=own.accept_arithmetic,
                )
            return self._made
