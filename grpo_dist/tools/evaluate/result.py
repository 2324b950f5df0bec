"""Results from verdicts: estimates per set, in total, and by source, difficulty or any other column; their
files and their table.

`result.json` is a pure function of the samples: an interrupted evaluation ends with the same bytes as an
uninterrupted one.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape

from grpo_dist.evaluation.estimates import Estimate, estimate, mean_of, measures_of_problem
from grpo_dist.runtime.files import replace_nan, write_text
from grpo_dist.runtime.tables import print_rows
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
        episodes: samples of an environment.
        turns: actions of an episode, mean.
        tool_calls: of an episode, mean.
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

    Two problems with calls (0, 2) and (1, 1) have 1 call an episode; 3 of 4 episodes have one.
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
    def from_problems(cls, identity: Identity, judged: list[JudgedProblem]) -> EvaluationResult:
        return cls(identity, judged, list(measure(judged)))

    @property
    def unscored_sets(self) -> list[str]:
        """Sets without a scored sample. Means over problems or sets do not have them."""
        scored = {j.set for j in self.judged if not np.isnan(j.verdict.flags).all()}
        return [name for name in dict.fromkeys(j.set for j in self.judged) if name not in scored]

    def metrics(self) -> dict[str, float]:
        """Return the metrics of an evaluation in training: ``eval/SET/pass@1``, ``_stderr`` ... Those of a
        set without a scored sample are NaN.
        """
        metrics: dict[str, float] = {}
        for m in self.measured:
            if m.by is not None or m.set in (ALL, MEAN):
                continue
            shares = dict(m.estimates)
            if m.episodes is not None:
                shares["tool_call_share"] = m.episodes.tool_call_share
            for name, share in shares.items():
                metrics |= {f"eval/{m.set}/{name}": share.value, f"eval/{m.set}/{name}_stderr": share.stderr}
            metrics |= {f"eval/{m.set}/length_tokens": m.length_tokens, f"eval/{m.set}/unscored": m.unscored}
        return metrics

    def write(self, directory: Path) -> None:
        lines = [json.dumps(replace_nan(j.to_json()), ensure_ascii=False) + "\n" for j in self.judged]
        write_text(directory / PROBLEMS, "".join(lines))
        report = {
            "schema": SCHEMA,
            **asdict(self.identity),
            "version": metadata.version("grpo-dist"),
            "method": _METHOD,
            "measured": [asdict(m) for m in self.measured],
        }
        write_text(directory / RESULT, json.dumps(replace_nan(report), indent=1, ensure_ascii=False) + "\n")


def measure(judged: Sequence[JudgedProblem]) -> Iterator[Measured]:
    """Estimate every set and its breakdowns; with several sets, also all problems and the mean of sets. A set
    that could not be scored takes nothing from the others.
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
        scored = [of_set for of_set in estimates if of_set]
        shared = [name for name in whole.estimates if all(name in of_set for of_set in scored)]
        lengths = [total.length_tokens for total in totals if not math.isnan(total.length_tokens)]
        yield replace(whole, estimates={name: whole.estimates[name] for name in shared})
        yield replace(
            whole,
            set=MEAN,
            truncated=float(np.mean([total.truncated for total in totals])),
            length_tokens=float(np.mean(lengths)) if lengths else math.nan,
            estimates={name: mean_of([of_set[name] for of_set in scored]) for name in shared},
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


def print_measured(console: Console, title: str, measured: Sequence[Measured]) -> None:
    """Print the table of results, and one of the episodes where there are any."""
    names = headings(list(dict.fromkeys(n for m in measured for n in m.estimates)))
    columns = ("set", "problems", *names.values(), "tokens", "cut off", "unscored")
    rows = [
        [
            _name(m),
            str(m.problems),
            *(format_interval(m.estimates.get(name)) for name in names),
            "–" if math.isnan(m.length_tokens) else f"{m.length_tokens:,.0f}",
            f"{m.truncated:.0%}",
            str(m.unscored or "–"),
        ]
        for m in measured
    ]
    print_rows(console, f"{escape(title)}: value [95 % interval], %", columns, rows)
    rows = [
        [
            _name(m),
            str(e.episodes),
            f"{e.turns:.1f}",
            f"{e.tool_calls:.2f}",
            format_interval(e.tool_call_share),
            f"{e.tool_error_share:.0%}" if e.tool_calls else "–",
            ", ".join(f"{end} {share:.0%}" for end, share in e.ends.items()),
        ]
        for m in measured
        if (e := m.episodes) is not None
    ]
    if rows:
        columns = ("set", "episodes", "turns", "calls", "with a call, %", "failed calls", "ends")
        print_rows(console, "episodes", columns, rows)


def headings(names: Sequence[str]) -> dict[str, str]:
    """Return the heading of each measure to print.

    Equal measures share a column: of n samples pass@1 is avg@n, and maj@n is cons@n.
    """
    headings = {name: name for name in names}
    for name in names:
        kind, _, n = name.partition("@")
        other = {"avg": "pass@1", "cons": f"maj@{n}"}.get(kind)
        if other in headings:
            del headings[other]
            headings[name] = f"{name}\n= {other}"
    return headings


def _name(measured: Measured) -> str:
    return escape(measured.set if measured.by is None else f"  {measured.by} {measured.value}")


def format_interval(share: Estimate | None) -> str:
    """Format an estimate in %: 0.5, 0.4 to 0.6 -> "50.0 [40.0, 60.0]"; None and NaN are "–"."""
    if share is None or math.isnan(share.value):
        return "–"
    return f"{100 * share.value:.1f} [{100 * share.low:.1f}, {100 * share.high:.1f}]"
