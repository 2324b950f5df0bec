"""Results of an evaluation: verdicts on problems, and estimates from them for a set, in total, and by source,
difficulty or any other column. Training and `grpo-dist eval` share them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from grpo_dist.evaluation.estimates import Estimate, estimate, mean_of, measures_of_problem
from grpo_dist.types import Group, Prompt, Rollout, correctness

ALL, MEAN = "all problems", "mean of sets"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The graded samples of one problem, as stored in a part of an evaluation.

    Attributes:
        correct: 1, 0 or None (unscored) for each sample.
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

    @classmethod
    def from_group(cls, group: Group) -> Verdict:
        """Return the verdict on a scored group, without votes."""
        return cls(
            key=key_of(group.prompt),
            uid=group.prompt.uid,
            correct=[None if np.isnan(flag) else float(flag) for flag in correctness(group)],
            numbers=None,
            answers=[],
            lengths=[rollout.num_tokens for rollout in group.rollouts],
            truncated=sum(rollout.finish_reason == "length" for rollout in group.rollouts),
            episodes=count_episodes(group.rollouts),
            timeouts=sum(outcome == "timeout" for outcome in group.outcomes),
        )

    @property
    def is_final(self) -> bool:
        """Return whether sampling again would give the same verdict. If no sample was scored, an engine or a
        judge may have been down; a grader that timed out would do so again.
        """
        return any(c is not None for c in self.correct) or self.timeouts == len(self.correct)

    @property
    def flags(self) -> np.ndarray:
        """Return the verdicts as float64 [samples], NaN for unscored ones."""
        return np.array([np.nan if c is None else c for c in self.correct])

    @property
    def completion_lengths(self) -> list[int]:
        """Return the tokens of each completion that was not given up; a graded one exists, even if empty."""
        return [n for n, c in zip(self.lengths, self.correct, strict=True) if n or c is not None]


def count_episodes(rollouts: Sequence[Rollout]) -> dict[str, list[Any]] | None:
    """Return for each episode of a problem the ``turns``, the tool ``calls``, the ``errors`` among them (not
    ended ``ok``), and how it ``ends`` (finish reason), without samples that were given up. None without an
    environment.
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
    """Return a digest of the prompt's tokens, its environment, and all that rewards read of it."""
    parts: list[Any] = [prompt.uid, prompt.answer, dict(prompt.columns)]
    if prompt.task is not None:
        parts += [prompt.task.environment, dict(prompt.task.kwargs)]
    text = json.dumps(parts, default=str, sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=12)
    digest.update(np.asarray(prompt.token_ids, np.int32).tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class JudgedProblem:
    """A problem of a set with its verdict, its breakdown columns and its value of each measure."""

    set: str
    prompt: Prompt
    by: Mapping[str, str]
    verdict: Verdict
    values: Mapping[str, float]  # by measure, NaN where it needs more scored samples

    @classmethod
    def from_verdict(
        cls, name: str, prompt: Prompt, by: Mapping[str, str], verdict: Verdict, ks: Sequence[int]
    ) -> JudgedProblem:
        sampled = len(verdict.correct)
        names = [*(f"pass@{k}" for k in ks), *([f"avg@{sampled}"] if sampled > 1 else [])]
        values = measures_of_problem(verdict.flags, ks, verdict.numbers)
        return cls(name, prompt, by, verdict, dict.fromkeys(names, math.nan) | values)

    def to_json(self) -> dict[str, Any]:
        verdict = asdict(self.verdict)
        named = {"set": self.set, "uid": verdict.pop("uid"), "problem": self.prompt.text}
        more = {"answer": self.prompt.answer, "by": dict(self.by)}
        return named | more | verdict | {"values": dict(self.values)}


@dataclass(frozen=True, slots=True)
class EpisodeFigures:
    """Figures of the episodes of several problems.

    Attributes:
        episodes: samples with an environment.
        turns: mean actions per episode.
        tool_calls: mean tool calls per episode.
        tool_call_share: share of episodes with a tool call; the interval is over problems.
        tool_error_share: share of calls that did not end ``ok``; 0 without calls.
        ends: share of episodes by finish reason; reasons that do not occur are left out.
    """

    episodes: int
    turns: float
    tool_calls: float
    tool_call_share: Estimate
    tool_error_share: float
    ends: dict[str, float]


def episode_figures(counts: Sequence[Mapping[str, Sequence[Any]]]) -> EpisodeFigures | None:
    """Summarise the episodes of several problems, each as `count_episodes` returns them; None for none.

    Two problems with calls (0, 2) and (1, 1) have 1 call per episode; 3 of 4 episodes have a call.
    """
    if not counts:
        return None

    def total(name: str) -> int:
        return sum(sum(problem[name]) for problem in counts)

    count = sum(len(problem["ends"]) for problem in counts)
    ends = Counter(end for problem in counts for end in problem["ends"])
    shares = [float(np.mean([calls > 0 for calls in problem["calls"]])) for problem in counts]
    return EpisodeFigures(
        episodes=count,
        turns=total("turns") / count,
        tool_calls=total("calls") / count,
        tool_call_share=estimate(shares, samples=count),
        tool_error_share=total("errors") / max(total("calls"), 1),
        ends={end: number / count for end, number in sorted(ends.items())},
    )


@dataclass(frozen=True, slots=True)
class Measured:
    """Estimates over a set, over its problems with ``value`` in column ``by``, or over all problems."""

    set: str
    by: str | None
    value: str | None
    problems: int
    samples: int
    unscored: int
    scored_problems: int  # with a scored sample
    truncated: float  # share of samples
    length_tokens: float  # mean completion length, without samples that were given up; NaN if all were
    estimates: dict[str, Estimate]
    episodes: EpisodeFigures | None = None  # None: no samples with an environment

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a set: ``eval/SET/pass@1``, ``_stderr`` ... They are NaN for a set without a
        scored sample.
        """
        metrics: dict[str, float] = {}
        for name, share in self.estimates.items():
            metrics[f"eval/{self.set}/{name}"] = share.value
            metrics[f"eval/{self.set}/{name}_stderr"] = share.stderr
        if self.episodes is not None:
            metrics[f"eval/{self.set}/tool_call_share"] = self.episodes.tool_call_share.value
            metrics[f"eval/{self.set}/tool_call_share_stderr"] = self.episodes.tool_call_share.stderr
        metrics[f"eval/{self.set}/length_tokens"] = self.length_tokens
        metrics[f"eval/{self.set}/problems"] = float(self.scored_problems)
        metrics[f"eval/{self.set}/unscored"] = float(self.unscored)
        return metrics


def measure(judged: Sequence[JudgedProblem]) -> Iterator[Measured]:
    """Estimate every set and its breakdowns; with several sets, also all problems and the mean of sets. A set
    that could not be scored is left out of the mean.
    """
    totals = []
    for name in dict.fromkeys(j.set for j in judged):
        in_set = [j for j in judged if j.set == name]
        totals.append(_measured(in_set, name))
        yield totals[-1]
        for column in in_set[0].by:
            values = {j.by[column] for j in in_set}
            for value in sorted(values, key=_sort_key) if len(values) > 1 else ():
                yield _measured([j for j in in_set if j.by[column] == value], name, column, value)
    if len(totals) > 1:
        whole = _measured(judged, ALL)
        estimates = [{n: e for n, e in total.estimates.items() if e.problems} for total in totals]
        scored = [by_measure for by_measure in estimates if by_measure]
        shared = [name for name in whole.estimates if all(name in by_measure for by_measure in scored)]
        lengths = [total.length_tokens for total in totals if not math.isnan(total.length_tokens)]
        yield replace(whole, estimates={name: whole.estimates[name] for name in shared})
        yield replace(
            whole,
            set=MEAN,
            truncated=float(np.mean([total.truncated for total in totals])),
            length_tokens=float(np.mean(lengths)) if lengths else math.nan,
            estimates={name: mean_of([by_measure[name] for by_measure in scored]) for name in shared},
            episodes=None,
        )


def _measured(
    judged: Sequence[JudgedProblem], name: str, by: str | None = None, value: str | None = None
) -> Measured:
    verdicts = [j.verdict for j in judged]
    samples = sum(len(v.correct) for v in verdicts)
    lengths = [n for v in verdicts for n in v.completion_lengths]

    def values(measure: str) -> list[float]:
        return [v for j in judged if not math.isnan(v := j.values.get(measure, math.nan))]

    return Measured(
        set=name,
        by=by,
        value=value,
        problems=len(judged),
        samples=samples,
        unscored=sum(c is None for v in verdicts for c in v.correct),
        scored_problems=sum(any(c is not None for c in v.correct) for v in verdicts),
        truncated=sum(v.truncated for v in verdicts) / samples,
        # Completions that were not sampled here have no tokens.
        length_tokens=float(np.mean(lengths)) if any(lengths) else math.nan,
        estimates={
            n: estimate(values(n), samples=samples)
            for n in dict.fromkeys(n for j in judged for n in j.values)
        },
        episodes=episode_figures([v.episodes for v in verdicts if v.episodes is not None]),
    )


def _sort_key(value: str) -> tuple[float, str]:
    """Sort numbers by size, then texts."""
    try:
        return float(value), ""
    except ValueError:
        return math.inf, value


def is_missing(rollout: Rollout) -> bool:
    """Return whether ``rollout`` stands for a sample that the engines gave up."""
    return rollout.finish_reason == "error" and not rollout.num_tokens and not rollout.turns
