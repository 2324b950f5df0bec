"""Compare two models on the same problems, with intervals and p-values of paired differences.

Pairing removes the shared variance from hard problems (Miller 2024,
arXiv:2411.00640, section 4.2).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape

from grpo_dist.algorithms.intervals import Z95
from grpo_dist.config.differences import changes
from grpo_dist.data.files import json_lines
from grpo_dist.errors import UserError, as_user_errors
from grpo_dist.evaluation.estimates import student
from grpo_dist.evaluation.result import ALL
from grpo_dist.runtime.files import read_json, write_text
from grpo_dist.runtime.tables import make_table, print_lines, wide_console
from grpo_dist.tools.evaluate.result import PROBLEMS, RESULT, headings

MCNEMAR = "McNemar, exact"
SIGN_FLIPS = "sign flips, exact"
_ENUMERATED = 16  # enumerate all sign flips up to this many differences, else draw at random
_FLIPS, _BLOCK = 100_000, 2_000

Problems = dict[tuple[str, str], dict[str, Any]]  # (set, uid) -> row of problems.jsonl


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """Mean of second - first over problems, with its 95 % interval and the two-sided p-value of ``test``."""

    value: float
    low: float
    high: float
    p: float
    test: str


@dataclass(frozen=True, slots=True)
class Paired:
    """One measure of two models on the same problems."""

    set: str
    measure: str
    problems: int
    first: float
    second: float
    difference: PairedDifference


@dataclass(frozen=True)
class ModelComparison:
    first: str
    second: str
    rows: list[Paired]
    warnings: list[str]


def compare_results(first: Path, second: Path, output: Path | None) -> None:
    """Compare two results; print the table and write it to ``output`` if set."""
    with as_user_errors():
        comparison = compare(first, second)
        print_comparison(wide_console(), comparison)
        if output is not None:
            if output.is_dir():
                raise UserError(f"--output {output} is a directory; with --compare it names a JSON file")
            write_text(output, json.dumps(asdict(comparison), indent=1, ensure_ascii=False) + "\n")


def print_comparison(console: Console, comparison: ModelComparison) -> None:
    names = headings([row.measure for row in comparison.rows])
    rows = [
        (
            escape(row.set),
            names[row.measure].replace("\n", " "),
            str(row.problems),
            f"{100 * row.first:.1f}",
            f"{100 * row.second:.1f}",
            f"{100 * gain.value:+.1f} [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}]",
            f"{gain.p:.3g}",
            gain.test,
        )
        for row in comparison.rows
        if row.measure in names
        for gain in [row.difference]
    ]
    title = f"A: {escape(comparison.first)}   B: {escape(comparison.second)}   %, B - A [95 % interval]"
    columns = ("set", "measure", "problems", "A", "B", "B - A", "p", "test")
    console.print(make_table(title, columns, rows, left=("set", "measure", "test"), wrap="text"))
    print_lines(console, (f"warning: {warning}" for warning in comparison.warnings), style="bold yellow")


def compare(first: Path, second: Path) -> ModelComparison:
    """Compare two result directories, or their result.json files.

    Raises ValueError if a path holds no result or the problems differ.
    """
    (a, ours), (b, theirs) = _read(first), _read(second)
    _check_same_problems(first, ours, second, theirs)
    shared = {name for name, _ in ours} & {name for name, _ in theirs}
    warnings = []
    for path, problems in ((first, ours), (second, theirs)):
        if alone := [name for name in dict.fromkeys(name for name, _ in problems) if name not in shared]:
            warnings.append(f"only {path} was measured on {', '.join(alone)}, which is not compared")
    rows = []
    sets = [name for name in dict.fromkeys(name for name, _ in ours) if name in shared]
    for name in [*sets, *([ALL] if len(sets) > 1 else [])]:
        keys = [key for key in ours if key[0] in shared and name in (key[0], ALL)]
        rows += list(
            _rows_of_set(name, [ours[k]["values"] for k in keys], [theirs[k]["values"] for k in keys])
        )
    if not rows:
        raise ValueError(
            f"{first} and {second}: no measure in common; evaluate both with the same "
            "evaluation.samples_per_prompt and evaluation.k"
        )
    if differences := changes(a["settings"], b["settings"]):
        settings = "; ".join(
            item.replace(" was ", " is ", 1).replace(" and is ", " of A and ") + " of B"
            for item in differences
        )
        warnings.append(
            f"A and B were measured with different settings, which may explain the difference: {settings}"
        )
    if a["fingerprint"] == b["fingerprint"]:
        warnings.append("A and B are the same model")
    return ModelComparison(f"{a['model']} ({first})", f"{b['model']} ({second})", rows, warnings)


def paired(first: Sequence[float], second: Sequence[float]) -> PairedDifference:
    """Test the difference of one measure on the same problems.

    If all values are 0 or 1, uses McNemar's exact test. Otherwise uses a sign-flip test: all flips up to
    2^16, else 100,000 flips drawn from a fixed seed. For 0 and 1 both tests agree.

    The interval is Student's, of the mean difference. For values of 0 and 1, or if all differences are equal,
    it is Wald's with pseudo-counts: half a problem in either direction and one without a difference
    (Agresti and Min 2005, Stat. Med. 24:729), which is also valid for few differences.
    """
    gains = np.asarray(second, float) - np.asarray(first, float)
    yes_or_no = set(first) | set(second) <= {0.0, 1.0}
    low, high = _wald(gains) if yes_or_no or np.ptp(gains) == 0.0 else _student(gains)
    if yes_or_no:
        p, test = mcnemar(int((gains > 0).sum()), int((gains < 0).sum())), MCNEMAR
    else:
        p, test = sign_flips(gains)
    return PairedDifference(float(gains.mean()), max(-1.0, low), min(1.0, high), p, test)


def _student(gains: np.ndarray) -> tuple[float, float]:
    half = student(len(gains) - 1) * float(gains.std(ddof=1)) / math.sqrt(len(gains))
    return float(gains.mean()) - half, float(gains.mean()) + half


def _wald(gains: np.ndarray) -> tuple[float, float]:
    n = len(gains) + 2
    centre = float(gains.sum()) / n
    half = Z95 * math.sqrt(max((float((gains**2).sum()) + 1) / n - centre**2, 0.0) / n)
    return centre - half, centre + half


def mcnemar(gained: int, lost: int) -> float:
    """Return the two-sided exact p-value: the probability that a fair coin splits as unevenly.

    9 gained, 1 lost: 2 * (1 + 10) / 2^10 = 0.0215. None gained or lost: 1.
    """
    n = gained + lost
    tail = sum(math.comb(n, i) for i in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / 2**n)


def sign_flips(gains: np.ndarray) -> tuple[float, str]:
    """Return the two-sided p-value of the sum of ``gains`` under random signs, and the name of the test.

    For random flips, adds 1 to count and total so that p is never 0 (Phipson and Smyth 2010,
    arXiv:1603.05766).
    """
    sizes = np.abs(gains[gains != 0])
    observed = abs(gains.sum()) - 1e-9 * sizes.sum()
    if len(sizes) <= _ENUMERATED:
        ways = np.arange(2 ** len(sizes))[:, None] >> np.arange(len(sizes)) & 1
        return float(np.mean(np.abs((2 * ways - 1) @ sizes) >= observed)), SIGN_FLIPS
    rng, beyond = np.random.default_rng(0), 0
    for _ in range(_FLIPS // _BLOCK):
        signs = 2.0 * rng.integers(0, 2, (_BLOCK, len(sizes)), dtype=np.int8) - 1.0
        beyond += int((np.abs(signs @ sizes) >= observed).sum())
    return (beyond + 1) / (_FLIPS + 1), f"sign flips, {_FLIPS:,} drawn"


def _rows_of_set(
    name: str, ours: Sequence[Mapping[str, float | None]], theirs: Sequence[Mapping[str, float | None]]
) -> Iterator[Paired]:
    """Compare every shared measure over the problems for which both have a value."""
    measures = {measure for values in theirs for measure in values}
    for measure in dict.fromkeys(m for values in ours for m in values if m in measures):
        pairs = [
            (x, y)  # null if too few samples are scored
            for a, b in zip(ours, theirs, strict=True)
            if (x := a.get(measure)) is not None and (y := b.get(measure)) is not None
        ]
        if pairs:
            first, second = ([pair[i] for pair in pairs] for i in (0, 1))
            means = float(np.mean(first)), float(np.mean(second))
            yield Paired(name, measure, len(pairs), *means, paired(first, second))


def _read(path: Path) -> tuple[dict[str, Any], Problems]:
    directory = path if path.is_dir() else path.parent
    report, problems = directory / RESULT, directory / PROBLEMS
    for file in (report, problems):
        if not file.is_file():
            raise ValueError(f"{path}: no {file.name} there; expected a result directory of `grpo-dist eval`")
    try:
        rows = {(str(row["set"]), str(row["uid"])): dict(row) for _, row in json_lines(problems)}
        content = read_json(report)
        about = {name: content[name] for name in ("model", "settings", "fingerprint")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{directory}: the result is incomplete ({error}); rerun `grpo-dist eval`"
        ) from error
    return about, rows


def _check_same_problems(first: Path, ours: Problems, second: Path, theirs: Problems) -> None:
    """Raise ValueError if a shared set differs, or if no set is shared."""
    shared = {name for name, _ in ours} & {name for name, _ in theirs}
    for here, problems, there, others in ((first, ours, second, theirs), (second, theirs, first, ours)):
        absent = [key for key in problems if key not in others]
        if not any(key[0] in shared for key in absent) and shared:
            continue  # only whole sets are missing: compare the others
        counts = Counter(name for name, _ in absent)
        lacking = ", ".join(f"{count} of {name}" for name, count in counts.items())
        example = problems[absent[0]]["problem"][:80]
        raise ValueError(
            f"measured on different problems: {here} has {len(absent)} that {there} lacks ({lacking}), e.g. "
            f"{example!r}; evaluate both on the same data"
        )
