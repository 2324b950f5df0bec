"""Estimates from verdicts: per set, in total, and by source, difficulty or any other column.

`result.json` is a pure function of the samples: an interrupted evaluation ends with the same bytes as an
uninterrupted one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from grpo_dist.data.files import json_lines
from grpo_dist.evaluation.estimates import Estimate, estimate, mean_of, of_problem
from grpo_dist.runtime.files import write_text
from grpo_dist.runtime.json_files import without_nan
from grpo_dist.tools.evaluate.episodes import EpisodeFigures
from grpo_dist.tools.evaluate.store import Identity
from grpo_dist.tools.evaluate.verdicts import Verdict
from grpo_dist.types import Prompt

SCHEMA = 1
RESULT, PROBLEMS = "result.json", "problems.jsonl"
ALL, MEAN = "all problems", "mean of sets"
_METHOD = (
    "estimates are means over problems; stderr: deviation over problems / sqrt(problems); low, high: 95 % "
    "Wilson interval for the effective number of problems; of the mean of sets added up from theirs"
)


@dataclass(frozen=True, slots=True)
class JudgedProblem:
    """A problem of a set with its verdict, its breakdown columns and its value of each measure."""

    set: str
    prompt: Prompt
    by: Mapping[str, str]
    verdict: Verdict
    values: Mapping[str, float]  # of each measure, NaN where it needs more scored samples

    @classmethod
    def of(
        cls, name: str, prompt: Prompt, by: Mapping[str, str], verdict: Verdict, ks: Sequence[int]
    ) -> JudgedProblem:
        drawn = len(verdict.correct)
        asked = [*(f"pass@{k}" for k in ks), *([f"avg@{drawn}"] if drawn > 1 else [])]
        known = of_problem(verdict.flags, ks, verdict.numbers)
        return cls(name, prompt, by, verdict, dict.fromkeys(asked, math.nan) | known)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> JudgedProblem:
        """Build from a row of problems.jsonl, which lacks the tokens of the prompt."""
        prompt = Prompt(row["uid"], np.empty(0, np.int32), row["answer"], row["set"], row["problem"])
        own = {f.name: row[f.name] for f in fields(Verdict) if f.name in row or f.default is MISSING}
        values = {name: math.nan if value is None else value for name, value in row["values"].items()}
        return cls(row["set"], prompt, row["by"], Verdict.from_json(own), values)

    def to_json(self) -> dict[str, Any]:
        own = self.verdict.to_json()
        named = {"set": self.set, "uid": own.pop("uid"), "problem": self.prompt.text}
        return (
            named | {"answer": self.prompt.answer, "by": dict(self.by)} | own | {"values": dict(self.values)}
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
    truncated: float  # share of samples
    length_tokens: float  # mean of a completion, without samples that were given up; NaN if all were
    estimates: dict[str, Estimate]
    episodes: EpisodeFigures | None = None  # of the samples of environments, if there are any


@dataclass(frozen=True)
class EvaluationResult:
    identity: Identity
    judged: list[JudgedProblem]
    measured: list[Measured]

    @classmethod
    def of(cls, identity: Identity, judged: list[JudgedProblem]) -> EvaluationResult:
        return cls(identity, judged, list(_measured(judged)))

    def with_earlier(self, earlier: Sequence[JudgedProblem]) -> EvaluationResult:
        """Return a result with the other sets of ``earlier`` first, then the sets of this one."""
        names = {judged.set for judged in self.judged}
        others = [judged for judged in earlier if judged.set not in names]
        return EvaluationResult.of(self.identity, [*others, *self.judged]) if others else self

    @property
    def unscored_sets(self) -> list[str]:
        """Sets without a scored sample. Means over problems or sets do not have them."""
        scored = {j.set for j in self.judged if not np.isnan(j.verdict.flags).all()}
        return [name for name in dict.fromkeys(j.set for j in self.judged) if name not in scored]

    def metrics(self) -> dict[str, float]:
        """Return the metrics of an evaluation in training: ``eval/SET/pass@1``, ``_stderr`` ... Those of a
        set without a scored sample are NaN.
        """
        found: dict[str, float] = {}
        for m in self.measured:
            if m.by is not None or m.set in (ALL, MEAN):
                continue
            for name, known in m.estimates.items():
                found |= {f"eval/{m.set}/{name}": known.value, f"eval/{m.set}/{name}_stderr": known.stderr}
            found |= {f"eval/{m.set}/length_tokens": m.length_tokens, f"eval/{m.set}/unscored": m.unscored}
            if m.episodes is not None:
                share = m.episodes.tool_call_share
                found |= {f"eval/{m.set}/tool_call_share": share.value}
                found |= {f"eval/{m.set}/tool_call_share_stderr": share.stderr}
        return found

    def write(self, directory: Path) -> None:
        lines = [json.dumps(without_nan(j.to_json()), ensure_ascii=False) + "\n" for j in self.judged]
        write_text(directory / PROBLEMS, "".join(lines))
        report = {
            "schema": SCHEMA,
            **self.identity.to_json(),
            "version": metadata.version("grpo-dist"),
            "method": _METHOD,
            "measured": [asdict(m) for m in self.measured],
        }
        write_text(directory / RESULT, json.dumps(without_nan(report), indent=1, ensure_ascii=False) + "\n")


def read_earlier(directory: Path, asked: Mapping[str, Collection[str]]) -> list[JudgedProblem]:
    """Return the problems in the earlier result of ``directory``, if there is one.

    Args:
        asked: uids of the problems to evaluate now, by set.

    Raises ValueError when a set to evaluate has an earlier result on entirely different problems.
    """
    path = directory / PROBLEMS
    try:
        earlier = [JudgedProblem.from_json(row) for _, row in json_lines(path)] if path.is_file() else []
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: not the problems of an evaluation ({error}); start over with --fresh, or choose "
            "another --output"
        ) from error
    for name, uids in asked.items():
        before = {judged.prompt.uid for judged in earlier if judged.set == name}
        if before and before.isdisjoint(uids):
            raise ValueError(
                f"{path}: already has a set {name} with {len(before)} other problems, which this evaluation "
                "would replace; give the new set a name of its own (data.eval.0.name=...), or choose another "
                "--output"
            )
    return earlier


def _measured(judged: list[JudgedProblem]) -> Iterator[Measured]:
    """Estimate every set and its breakdowns; with several sets, also all problems and the mean of sets."""
    sets = list(dict.fromkeys(j.set for j in judged))
    totals = []
    for name in sets:
        own = [j for j in judged if j.set == name]
        totals.append(_of(own, name))
        yield totals[-1]
        yield from _parts(own, name)
    if len(sets) > 1:
        whole = _of(judged, ALL)
        known = [{n: e for n, e in total.estimates.items() if e.problems} for total in totals]
        scored = [
            own for own in known if own
        ]  # one set that could not be scored takes nothing from the others
        shared = [name for name in whole.estimates if all(name in own for own in scored)]
        whole = replace(whole, estimates={name: whole.estimates[name] for name in shared})
        means = {name: mean_of([own[name] for own in scored]) for name in shared}
        lengths = [t.length_tokens for t in totals if not math.isnan(t.length_tokens)]
        yield whole
        yield Measured(
            MEAN, None, None, whole.problems, whole.samples, whole.unscored,
            float(np.mean([t.truncated for t in totals])),
            float(np.mean(lengths)) if lengths else math.nan, means,
        )  # fmt: skip


def _parts(judged: list[JudgedProblem], name: str) -> Iterator[Measured]:
    for column in judged[0].by:
        values = {j.by[column] for j in judged}
        if len(values) > 1:
            for value in sorted(values, key=_in_order):
                yield _of([j for j in judged if j.by[column] == value], name, column, value)


def _of(judged: list[JudgedProblem], name: str, by: str | None = None, value: str | None = None) -> Measured:
    verdicts = [j.verdict for j in judged]
    samples = sum(len(v.correct) for v in verdicts)
    lengths = [n for v in verdicts for n in v.drawn_lengths]
    names = dict.fromkeys(n for j in judged for n in j.values)
    return Measured(
        set=name,
        by=by,
        value=value,
        problems=len(judged),
        samples=samples,
        unscored=sum(c is None for v in verdicts for c in v.correct),
        truncated=sum(v.truncated for v in verdicts) / samples,
        length_tokens=float(np.mean(lengths)) if lengths else math.nan,
        estimates={n: estimate(_known(judged, n), samples=samples) for n in names},
        episodes=EpisodeFigures.of([v.episodes for v in verdicts if v.episodes is not None]),
    )


def _known(judged: list[JudgedProblem], measure: str) -> list[float]:
    values = (j.values.get(measure, math.nan) for j in judged)
    return [value for value in values if not math.isnan(value)]


def _in_order(value: str) -> tuple[float, str]:
    """Sort numbers by size, then texts."""
    try:
        return float(value), ""
    except ValueError:
        return math.inf, value
