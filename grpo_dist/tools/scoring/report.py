"""Output of `grpo-dist score`: tables, and files of all scores and of disagreements."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape

from grpo_dist.runtime.files import write_text
from grpo_dist.runtime.tables import print_lines, print_rows
from grpo_dist.tools.scoring.agreement import Agreement
from grpo_dist.tools.scoring.scorer import Outcome, Scored

_BINS = 10
_BARS = " ▁▂▃▄▅▆▇█"
_PLACES = 3
_TAIL = 160  # characters to show of a completion, from its end


def write_scores(path: Path, outcome: Outcome) -> None:
    """Write every row with its `score`: values for a single completion, lists for a list of completions."""
    lines: list[tuple[int, str]] = []
    for number, scored in enumerate(outcome.scored):
        row, scores = scored.row, _scores(scored)
        samples = [(number, row.record, slice(None))] if row.is_list else [(number, row.record, 0)]
        if row.samples:  # each has a row of its own in the table
            samples = [(own, sample.record, i) for i, (own, sample) in enumerate(row.samples)]
        lines += [(own, _line({**record, "score": _picked(scores, which)})) for own, record, which in samples]
    write_text(path, "".join(line for _, line in sorted(lines)))


def _scores(scored: Scored) -> dict[str, Any]:
    """Return the values of all completions of a row."""
    scores = scored.scores
    return {
        "reward": list(map(_plain, scores.rewards)),
        "parts": {name: list(map(_plain, part)) for name, part in scores.parts.items()},
        "outcome": list(map(_plain, scores.outcomes)),
        "seconds": round(scored.seconds, 6),
    }


def _picked(scores: dict[str, Any], which: int | slice) -> dict[str, Any]:
    """Return ``scores`` with the values of some completions, or of one."""
    parts = {name: part[which] for name, part in scores["parts"].items()}
    return scores | {"reward": scores["reward"][which], "parts": parts, "outcome": scores["outcome"][which]}


def _plain(value: Any) -> Any:
    """Convert a numpy value for JSON; a float32 0.1 becomes 0.1, the shortest text that gives it back."""
    if not isinstance(value, np.floating):
        return value.item() if isinstance(value, np.generic) else value
    return None if np.isnan(value) else float(str(value))


def write_disagreements(
    path: Path, outcome: Outcome, graders: dict[str, np.ndarray], indices: np.ndarray
) -> list[dict[str, Any]]:
    """Write a row for each completion on which ``graders`` disagree, and return the rows."""
    flat = [(s, i) for s in outcome.scored for i in range(len(s.row.completions))]
    rows = []
    for index in indices:
        scored, i = flat[index]
        rows.append(
            {
                "location": scored.row.locations[i],
                "problem": scored.row.problem,
                "answer": scored.row.answer,
                "completion": scored.row.completions[i],
                "outcome": scored.scores.outcomes[i],
                "graders": {n: None if math.isnan(v[index]) else float(v[index]) for n, v in graders.items()},
            }
        )
    write_text(path, "".join(_line(row) for row in rows))
    return rows


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def print_scores(console: Console, outcome: Outcome, parts: dict[str, np.ndarray]) -> None:
    """Print distributions, also of the total by source, outcomes, reasons of unscored completions, and times.

    ``parts``: those of ``outcome``.
    """
    totals, of = {"total": outcome.rewards()}, outcome.sources()
    if len(sources := dict.fromkeys(of)) > 1:
        totals |= {f"total of {name or 'other sources'}": totals["total"][of == name] for name in sources}
    asked = {name: outcome.has(name) for name in parts}
    columns = ("reward", "scored", "unscored", "mean", "std", "min", "p50", "max", "distribution")
    rows = [[escape(name), *_distribution(own)] for name, own in totals.items()]
    rows += [[escape(name), *_distribution(own[asked[name]])] for name, own in parts.items()]
    print_rows(console, "rewards", columns, rows)
    outcomes = Counter(o for s in outcome.scored for o in s.scores.outcomes if o)
    if outcomes:
        console.print("math outcomes: " + ", ".join(f"{o} {n}" for o, n in outcomes.most_common()))
    missing = {name: np.flatnonzero(np.isnan(part) & asked[name]) for name, part in parts.items()}
    print_lines(console, (_unscored(outcome, name, own) for name, own in missing.items() if len(own)))
    _print_time(console, outcome)


def _unscored(outcome: Outcome, name: str, missing: np.ndarray) -> str:
    """Describe the unscored completions of a reward: count, first locations, and error messages."""
    where = [location for s in outcome.scored for location in s.row.locations]
    first = ", ".join(where[i] for i in missing[:_PLACES])
    errors = [f"{count} times: {text}" for text, count in outcome.failures.get(name, Counter()).most_common()]
    return f"unscored: {name}: {len(missing)}, e.g. {first}" + "".join(f"\n    {line}" for line in errors)


def _distribution(values: np.ndarray) -> list[str]:
    known = values[~np.isnan(values)]
    if not len(known):
        return ["0", str(len(values)), *["–"] * 6]
    numbers = (known.mean(), known.std(), known.min(), float(np.median(known)), known.max())
    return [
        str(len(known)),
        str(len(values) - len(known)) if len(known) < len(values) else "–",
        *(f"{number:.3f}" for number in numbers),
        bars(known),
    ]


def bars(values: np.ndarray) -> str:
    """Draw a histogram of ten characters over the finite values; one character if all are equal."""
    values = values[np.isfinite(values)]
    if not len(values) or values.min() == values.max():
        return _BARS[-1]
    counts, _ = np.histogram(values, bins=_BINS)
    steps = np.ceil(counts / counts.max() * (len(_BARS) - 1)).astype(int)
    return "".join(_BARS[step] for step in steps)


def _print_time(console: Console, outcome: Outcome) -> None:
    """Print the time per completion: the time of a row divided by its completions."""
    each = sorted(s.seconds_each for s in outcome.scored for _ in s.row.completions)
    p50, p99 = (each[math.ceil(q * len(each)) - 1] for q in (0.5, 0.99))
    console.print(
        f"{len(each)} completions in {outcome.seconds:.1f} s, {len(each) / outcome.seconds:,.0f} a second in "
        f"{outcome.processes} processes; each {1e3 * p50:.1f} ms (p50), {1e3 * p99:.0f} ms (p99)"
    )
    slowest = sorted(outcome.scored, key=lambda s: -s.seconds_each)[:3]
    shown = ", ".join(f"{s.row.location} {1e3 * s.seconds_each:.0f} ms" for s in slowest)
    print_lines(console, [f"slowest: {shown}"])


def print_agreements(console: Console, found: Sequence[Agreement]) -> None:
    columns = ("A", "B", "both", "only A", "only B", "neither", "unscored", "agreement", "Cohen's kappa")
    rows = [
        [
            escape(pair.first), escape(pair.second), str(pair.both), str(pair.only_first),
            str(pair.only_second), str(pair.neither), str(pair.unscored or "–"), _number(pair.rate, "{:.2%}"),
            _number(pair.kappa, "{:.3f}"),
        ]
        for pair in found
    ]  # fmt: skip
    print_rows(console, "graders: completions that A and B call right", columns, rows)


def _number(value: float, form: str) -> str:
    return "–" if math.isnan(value) else form.format(value)


def print_disagreements(console: Console, rows: Sequence[dict[str, Any]], shown: int) -> None:
    for row in rows[:shown]:
        verdicts = ", ".join(
            f"{name} {'unscored' if value is None else f'{value:g}'}"
            for name, value in row["graders"].items()
        )
        text = row["completion"]
        tail = ("..." if len(text) > _TAIL else "") + text[-_TAIL:]
        print_lines(console, [f"{row['location']}: {verdicts}; answer {row['answer']!r}: {tail!r}"])
