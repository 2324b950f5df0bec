"""Verdicts on the problems of an evaluation: graded samples, and which of them gave the same answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np

from grpo_dist.config import RewardsConfig
from grpo_dist.evaluation.sampling import is_missing
from grpo_dist.evaluation.votes import final_answers, numbered
from grpo_dist.rewards.pool import GraderPool
from grpo_dist.rewards.text import boxes
from grpo_dist.rewards.thought import final_text, normalise_tags, resolve_thought, strip_unclosed_thought
from grpo_dist.types import Group, Prompt, Rollout, correctness

_ANSWER_CHARACTERS = 200  # of an answer that are kept


@dataclass(frozen=True, slots=True)
class Verdict:
    """The graded samples of one problem, as a part of an evaluation stores them.

    Attributes:
        correct: 1, 0 or None (unscored) of each sample.
        numbers: equal for equal answers, -1 for no answer; None for a single sample, and where neither the
            math grader nor a judge ran.
        lengths: tokens of each completion; 0 for a sample that the engines gave up.
        truncated: truncated samples.
        episodes: as `count_episodes` returns it.
        timeouts: samples that the math grader did not judge in time.
    """

    key: str
    uid: str
    correct: Sequence[float | None]
    numbers: Sequence[int] | None
    answers: Sequence[str]
    lengths: Sequence[int]
    truncated: int
    episodes: Mapping[str, Sequence[Any]] | None = None
    timeouts: int = 0

    @property
    def is_final(self) -> bool:
        """Whether sampling again would give the same verdict. Where no sample was scored, an engine or a
        judge may have been down; a grader that ran out of time would do so again.
        """
        return any(c is not None for c in self.correct) or self.timeouts == len(self.correct)

    @property
    def flags(self) -> np.ndarray:
        """float64 [samples], NaN for unscored ones."""
        return np.array([np.nan if c is None else c for c in self.correct])

    @property
    def completion_lengths(self) -> list[int]:
        """Tokens of each completion that was not given up; one that was graded exists, even if empty."""
        return [n for n, c in zip(self.lengths, self.correct, strict=True) if n or c is not None]


def count_episodes(rollouts: Sequence[Rollout]) -> dict[str, list[Any]] | None:
    """Return of each episode of a problem the ``turns``, the tool ``calls``, the ``errors`` among them (not
    ended ``ok``), and how it ``ends`` (finish reason). Samples that were given up are left out. None without
    an environment.
    """
    if not any(rollout.turns for rollout in rollouts):
        return None
    episodes = [rollout for rollout in rollouts if not is_missing(rollout)]
    calls = [[call.outcome for turn in rollout.turns for call in turn.calls] for rollout in episodes]
    return {
        "turns": [len(rollout.turns) for rollout in episodes],
        "calls": [len(outcomes) for outcomes in calls],
        "errors": [sum(outcome != "ok" for outcome in outcomes) for outcomes in calls],
        "ends": [rollout.finish_reason for rollout in episodes],
    }


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
    """Makes verdicts of scored groups. Thread-safe; a context manager whose processes start on first use.
    ``pool``: of the caller, in place of processes of its own.
    """

    def __init__(self, rewards: RewardsConfig, pool: GraderPool | None = None) -> None:
        self._rewards, self._shared, self._lock = rewards, pool, Lock()
        self._started: GraderPool | None = None

    def __enter__(self) -> VerdictMaker:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._started is not None:
            self._started.close()

    def verdicts(self, groups: Sequence[Group]) -> list[Verdict]:
        return [self._verdict(group) for group in groups]

    def _verdict(self, group: Group) -> Verdict:
        flags = correctness(group)
        comparable = len(flags) > 1 and any(group.outcomes)
        answers = self._answers(group) if comparable else []
        return Verdict(
            key=key_of(group.prompt),
            uid=group.prompt.uid,
            correct=[None if np.isnan(flag) else float(flag) for flag in flags],
            numbers=numbered(answers, flags.tolist(), self._pool) if comparable else None,
            answers=[answer[:_ANSWER_CHARACTERS] for answer in answers],
            lengths=[rollout.num_tokens for rollout in group.rollouts],
            truncated=sum(rollout.finish_reason == "length" for rollout in group.rollouts),
            episodes=count_episodes(group.rollouts),
            timeouts=sum(outcome == "timeout" for outcome in group.outcomes),
        )

    def _answers(self, group: Group) -> list[str]:
        """Return each sample's answer. Only wrong ones without a box need a search: right ones are equal."""
        thought = resolve_thought(group.prompt.thought, self._rewards)
        texts = [normalise_tags(strip_unclosed_thought(r.text, thought), thought) for r in group.rollouts]
        answers = [""] * len(texts)
        wrong = [i for i, outcome in enumerate(group.outcomes) if outcome == "wrong"]
        for i, answer in zip(wrong, final_answers([texts[i] for i in wrong], self._pool), strict=True):
            answers[i] = answer
        for i, outcome in enumerate(group.outcomes):
            if outcome == "correct":
                answers[i] = (boxes(final_text(texts[i])) or [group.prompt.answer])[-1]
        return answers

    def _pool(self) -> GraderPool:
        if self._shared is not None:
            return self._shared
        with self._lock:
            if self._started is None:
                self._started = GraderPool.from_config(self._rewards)
            return self._started
