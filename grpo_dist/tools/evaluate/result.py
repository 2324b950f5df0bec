"""The result of `grpo-dist eval` and `score`: votes of samples, files, and the printed table.

`result.json` is a pure function of the samples: an interrupted evaluation ends with the same bytes as an
uninterrupted one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape

from grpo_dist.config import RewardsConfig
from grpo_dist.evaluation.estimates import Estimate
from grpo_dist.evaluation.result import ALL, MEAN, JudgedProblem, Measured, Verdict, measure
from grpo_dist.evaluation.votes import final_answers, numbered
from grpo_dist.rewards.group import CompletionGroup
from grpo_dist.rewards.pool import GraderPool
from grpo_dist.rewards.text import boxes
from grpo_dist.rewards.thought import final_text
from grpo_dist.runtime.files import replace_nan, write_text
from grpo_dist.runtime.tables import print_rows
from grpo_dist.tools.evaluate.store import Identity
from grpo_dist.types import Group, correctness

SCHEMA = 1
RESULT, PROBLEMS = "result.json", "problems.jsonl"
_METHOD = (
    "estimates are means over problems; stderr: deviation over problems / sqrt(problems); low, high: 95 % "
    "Wilson interval for the effective number of problems; of the mean of sets added up from theirs"
)
_ANSWER_CHARACTERS = 200  # maximum length of a stored answer


def make_verdict(group: Group, rewards: RewardsConfig, pool: GraderPool) -> Verdict:
    """Return the verdict on a scored group, with its samples' votes if the math grader or a judge ran.
    ``pool`` compares answers that differ as text.
    """
    verdict, flags = Verdict.from_group(group), correctness(group)
    if len(flags) < 2 or not any(group.outcomes):
        return verdict
    answers = _answers(group, rewards, pool)
    short_answers = [answer[:_ANSWER_CHARACTERS] for answer in answers]
    return replace(verdict, numbers=numbered(answers, flags.tolist(), pool), answers=short_answers)


def _answers(group: Group, rewards: RewardsConfig, pool: GraderPool) -> list[str]:
    """Return each sample's answer. Only wrong answers without a box need a search; correct ones are equal."""
    completions = CompletionGroup.from_rollouts(
        group.prompt, group.rollouts, max_new_tokens=0, settings=rewards
    )
    texts = completions.graded_texts
    answers = [""] * len(texts)
    wrong = [i for i, outcome in enumerate(group.outcomes) if outcome == "wrong"]
    for i, answer in zip(wrong, final_answers([texts[i] for i in wrong], pool), strict=True):
        answers[i] = answer
    for i, outcome in enumerate(group.outcomes):
        if outcome == "correct":
            answers[i] = (boxes(final_text(texts[i])) or [group.prompt.answer])[-1]
    return answers


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
        """Sets without a scored sample. Means over problems or sets exclude them."""
        scored = {j.set for j in self.judged if not np.isnan(j.verdict.flags).all()}
        return [name for name in dict.fromkeys(j.set for j in self.judged) if name not in scored]

    def metrics(self) -> dict[str, float]:
        """Return the metrics of every set, as an evaluation during training does."""
        sets = [m for m in self.measured if m.by is None and m.set not in (ALL, MEAN)]
        return {name: value for m in sets for name, value in m.metrics().items()}

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


def print_measured(console: Console, title: str, measured: Sequence[Measured]) -> None:
    """Print the table of results, and a table of episodes if there are any."""
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
    """Return the heading of each printed measure.

    Equal measures share a column: with n samples pass@1 is avg@n, and maj@n is cons@n.
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
