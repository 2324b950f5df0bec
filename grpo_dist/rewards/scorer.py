"""Scores a group with every reward, combined with weights and gates. Scorers of sources with separate rewards
share the servers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Float64

from grpo_dist.config import RewardModelConfig, RewardsConfig
from grpo_dist.config.rewards import FunctionConfig
from grpo_dist.errors import failure_kind
from grpo_dist.rewards.group import CompletionGroup, Turns, Verdicts, describe_failure
from grpo_dist.rewards.pool import Failure, GraderPool
from grpo_dist.rewards.registry import REWARDS, StepScores, UserFunction, make
from grpo_dist.rewards.served import deciding_judge, judged_outcomes

Term = FunctionConfig | RewardModelConfig  # a part of the total, with its weight and gate

_WARNINGS_PER_REWARD = 20  # distinct messages; a function may put its input in each


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of G completions.

    Attributes:
        parts: scores of each reward by name, before weights and gates.
        outcomes: [G] outcomes of the math grader, or of a judge instead; "" if no reward used either.
        steps: step scores of a function of kind process.
        failures: [G] why each sample was not scored, a reason per missing reward; (): all were scored.
    """

    rewards: Float32[np.ndarray, " G"]
    parts: dict[str, Float32[np.ndarray, " G"]]
    outcomes: list[str]
    steps: StepScores | None = None
    failures: tuple[tuple[str, ...], ...] = ()


class Scorer:
    """Scores completions of one problem with every reward. Thread-safe.

    ``failures`` counts why samples could not be scored, by reward and the first message of each
    `failure_kind`; `news` returns these messages once.

    Args:
        models: reward models, whose scores are passed to `score`.
        sharing: by reward name, the number of scorers in the run that share its server's rate limit.
        outcome_rewards: `environments.outcome_rewards`, added to the reward of episodes with these ends.

    Raises:
        ValueError: a reward cannot be used, or two share a name.
    """

    def __init__(
        self,
        functions: Sequence[FunctionConfig],
        pool: GraderPool,
        *,
        models: Sequence[RewardModelConfig] = (),
        sharing: Mapping[str, int] | None = None,
        outcome_rewards: Mapping[Any, float] | None = None,
    ) -> None:
        self._pool, self._lock = pool, Lock()
        self._outcome_rewards = dict(outcome_rewards or {})
        self._terms: list[Term] = [*functions, *models]
        self.failures: dict[str, Counter[str]] = {}
        self._news: list[str] = []
        self._first: dict[str, str] = {}  # first message of each kind of failure
        self._last: dict[str, str] = {}  # last message of each reward
        names = [term.label for term in self._terms]
        if len(set(names)) != len(names):
            raise ValueError(f"two rewards share a name: {names}; give each `name` once")
        self._user_functions = {
            f.label: UserFunction(f, pool) for f in functions if f.function not in REWARDS
        }
        self._builtin = {f.label: make(f) for f in functions if f.function in REWARDS}
        self._judge = deciding_judge({f.label: f.function for f in functions})
        for name, reward in self._builtin.items():
            reward.start(workers=(sharing or {}).get(name, 1), note=partial(self._note, name))

    @property
    def max_concurrency(self) -> int:
        """Calls of its rewards to servers and sandboxes that may run at once, in as many calls of `score`."""
        return sum(getattr(reward, "max_concurrency", 0) for reward in self._builtin.values())

    def score(
        self, group: CompletionGroup, modelled: Mapping[str, Float32[np.ndarray, " G"]] | None = None
    ) -> Scores:
        """Compute every reward and their combination.

        User functions are called as in `registry`, with the names they accept. An exception, a timeout,
        None, NaN, a value that is not finite as float32, and a failed environment mean "could not be scored".

        Args:
            modelled: scores of each reward model, by name.
        """
        verdicts = Verdicts(group, self._pool, self._outcome_rewards)
        values: dict[str, Any] = dict(modelled or {})
        for name, reward in self._builtin.items():
            values[name] = reward.score(group, verdicts)
        steps, details = None, dict[str, list[str]]()
        for name, function in self._user_functions.items():
            results, step_scores = function.score(group)
            steps = steps or step_scores
            values[name] = [math.nan if isinstance(result, Failure) else result for result in results]
            details[name] = [result.detail if isinstance(result, Failure) else "" for result in results]
            for detail in filter(None, details[name]):
                self._note(name, detail)
        parts = {term.label: to_part(values[term.label]) for term in self._terms}
        for name, part in parts.items():
            details.setdefault(name, [""] * len(part))
            for i, value in enumerate(np.asarray(values[name], dtype=np.float64)):
                if np.isnan(part[i]) and not np.isnan(value):  # NaN and None are intended and need no note
                    details[name][i] = (
                        f"gave {value:g}, which is not finite as a float32; the sample is not scored"
                    )
                    self._note(name, details[name][i])
        judged = parts[self._judge].tolist() if self._judge else None
        outcomes = verdicts.outcomes if judged is None else judged_outcomes(judged, verdicts.outcomes)
        rewards = combine(parts, self._terms)
        failures: list[list[str]] = [[] for _ in rewards]
        for i in np.flatnonzero(np.isnan(rewards)).tolist():
            lacking = [term for term in self._terms if np.isnan(parts[term.label][i])]
            for term in [term for term in lacking if term.weight] or lacking:  # without weight: gates
                reason = details[term.label][i] or self._latest(term.label, verdicts, i)
                failures[i].append(f"reward {term.label}: {reason}")
        scores = Scores(rewards, parts, outcomes, steps, _make_failures(failures))
        return self._ended(group, scores) if any(group.turns) or "error" in group.finish_reasons else scores

    def news(self) -> tuple[str, ...]:
        """Return messages not returned before: why samples were not scored, and other notes of rewards."""
        with self._lock:
            news, self._news = tuple(self._news), []
        return news

    def close(self) -> None:
        for reward in self._builtin.values():
            reward.close()

    def _ended(self, group: CompletionGroup, scores: Scores) -> Scores:
        """Add the rewards of episodes' ends; failed and abandoned samples are not scored."""
        reasons, outcomes = group.finish_reasons, list(scores.outcomes)
        failures: list[Sequence[str]] = list(scores.failures or [()] * len(reasons))
        turns: Sequence[Turns] = group.turns or [()] * len(reasons)
        rewards = add_outcome_rewards(scores.rewards, reasons, turns, self._outcome_rewards)
        failed = np.equal(reasons, "error")
        for i in np.flatnonzero(failed):
            outcomes[i] = outcomes[i] and "error"
            if group.turns:
                self._note("environment", describe_failure(turns[i]))
                failures[i] = [f"environment: {describe_failure(turns[i])}"]
        parts = {name: np.where(failed, np.float32(np.nan), part) for name, part in scores.parts.items()}
        rewards = np.where(failed, np.float32(np.nan), rewards)
        return Scores(rewards, parts, outcomes, scores.steps, _make_failures(failures))

    def _latest(self, name: str, verdicts: Verdicts, sample: int) -> str:
        """Return why the built-in reward, the model or the user's function ``name`` gave no score."""
        with self._lock:
            if name in self._builtin and name in self._last:
                return self._last[name]
        if name in self._builtin and (failure := verdicts.failures[sample]):
            return f"the math grader gave no verdict ({failure})"
        return "it returned None or NaN, which mean that it could not be scored"

    def _note(self, name: str, detail: str) -> None:
        with self._lock:
            self._last[name] = detail
            counts = self.failures.setdefault(name, Counter())
            first = self._first.setdefault(f"{name} {failure_kind(detail)}", detail)
            is_new = first not in counts
            if is_new and len(counts) >= _WARNINGS_PER_REWARD:
                first, is_new = "further messages", False
            counts[first] += 1
            if is_new:
                self._news.append(f"reward {name}: {first}")


def _make_failures(failures: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    return tuple(map(tuple, failures)) if any(failures) else ()


def to_part(values: Any) -> Float32[np.ndarray, " G"]:
    """Convert to float32; a value that is not finite as float32 (infinity, 1e39) becomes NaN."""
    numbers = np.asarray(values, dtype=np.float64)
    within = np.abs(numbers) <= np.finfo(np.float32).max
    return np.where(within, numbers, np.nan).astype(np.float32)


def combine(parts: Mapping[str, Float[np.ndarray, " G"]], terms: Sequence[Term]) -> Float32[np.ndarray, " G"]:
    """Sum weight * part over ``terms``, each part after its gate.

    A gated part keeps its value where its gate is above the threshold, is NaN where the gate is NaN, and 0
    elsewhere. The gate of a gate is applied first. The sum is NaN where a term of non-zero weight is NaN,
    since "not scored" is not 0. A part or sum that is not finite as float32 is NaN (`to_part`).

        math [1, 0, NaN] of weight 1, brevity [-0.5, -0.5, -0.5] of weight 2 with gate math -> [0, 0, NaN]
    """
    by_name = {term.label: term for term in terms}
    total = np.zeros(len(next(iter(parts.values()))), dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # overflow becomes NaN in `to_part`
        for term in terms:
            if term.weight:
                total += term.weight * _gated(term, parts, by_name)
    return to_part(total)


def _gated(
    term: Term, parts: Mapping[str, Float[np.ndarray, " G"]], terms: Mapping[str, Term]
) -> Float64[np.ndarray, " G"]:
    part = to_part(parts[term.label]).astype(np.float64)
    if term.gate is None:
        return part
    gate = _gated(terms[term.gate], parts, terms)
    # Parts are float32, and float32(0.6) is above the float64 0.6.
    opens = gate > float(np.float32(term.gate_above))
    return np.where(np.isnan(gate), np.nan, np.where(opens, part, 0.0))


def add_outcome_rewards(
    rewards: Float32[np.ndarray, " G"],
    finish_reasons: Sequence[str],
    turns: Sequence[Turns],
    added: Mapping[Any, float],
) -> Float32[np.ndarray, " G"]:
    """Return ``rewards`` plus the `environments.outcome_rewards` of episodes."""
    more = [
        added.get(why, 0.0) if is_episode else 0.0
        for why, is_episode in zip(finish_reasons, turns, strict=True)
    ]
    return (rewards + np.array(more)).astype(np.float32)


def scorers_by_source(
    variants: Mapping[str, RewardsConfig],
    pool: GraderPool,
    *,
    workers: int,
    outcome_rewards: Mapping[Any, float] | None = None,
) -> dict[str, Scorer]:
    """Return a scorer for each source.

    Args:
        variants: the rewards of each source.
        workers: processes or threads of the run with these scorers, which share a server's rate limit.
        outcome_rewards: see `Scorer`.

    Raises:
        ValueError: as `Scorer`.
    """
    scorer_counts = Counter(function.label for rewards in variants.values() for function in rewards.functions)
    sharing = {name: workers * count for name, count in scorer_counts.items()}
    return {
        source: Scorer(
            rewards.functions, pool, models=rewards.models, sharing=sharing, outcome_rewards=outcome_rewards
        )
        for source, rewards in variants.items()
    }
