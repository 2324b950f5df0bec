"""Accuracy and latency of the math grader on labelled cases, compared with plain math-verify.

    python -m tests.evidence.grading equivalence_cases.jsonl [gsm8k_graded_solutions.jsonl] [--show]
    [--workers N]

The first file holds pairs (``gold``, ``pred``, ``expected``, ``gold_form``, ``pred_form``, ``tags``). The
second holds solutions by models that end in ``A: 26``, with ``answer`` and ``is_correct``. A bare ``pred`` is
boxed, as by a model. A grader process grades every pair under a deadline; a timeout counts as rejected.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from math_verify import parse, verify

from grpo_dist.rewards.pool import Failure, GraderPool

_ROOT = Path(__file__).resolve().parents[2]  # where a grader process finds this module
_PEER = "tests.evidence.grading:plain_math_verify"


@dataclass(frozen=True, slots=True)
class Case:
    """``subset``: plain, hard (HardVerify-Math) or bomb (hangs some graders)."""

    gold: str
    gold_form: str
    completion: str
    expected: bool
    subset: str


@dataclass(frozen=True, slots=True)
class GradedCase:
    """One case as graded: reward 1, 0 or NaN, and the time it took in seconds."""

    case: Case
    reward: float
    seconds: float

    @property
    def right(self) -> bool:
        return (self.reward == 1.0) == self.case.expected


def read_cases(path: str | Path) -> list[Case]:
    """Read ``equivalence_cases.jsonl``. Raises ValueError with file and line for an invalid pair."""
    cases = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            subset = "bomb" if "bomb" in row["tags"] else "hard" if "tinyv" in row["tags"] else "plain"
            is_bare = row["pred_form"] == "expr"
            completion = f"The answer is $\\boxed{{{row['pred']}}}$." if is_bare else row["pred"]
            cases.append(Case(row["gold"], row["gold_form"], completion, bool(row["expected"]), subset))
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{path}:{number}: {type(error).__name__} {error}; expected one JSON object per line with "
                "gold, gold_form, pred, pred_form, expected and tags"
            ) from error
    return cases


def plain_math_verify(gold: str, gold_form: str, completion: str) -> float:
    """Grade with the defaults of math-verify 0.9: a bare gold is boxed, all boxes of the response count."""
    boxed = f"\\boxed{{{gold}}}" if gold_form == "expr" else gold
    return float(verify(parse(boxed), parse(completion)))


def judge_with_ours(cases: Sequence[Case], pool: GraderPool, threads: int) -> list[GradedCase]:
    return _timed(cases, lambda case: pool.grade([(case.completion, case.gold)])[0].reward, threads)


def judge_with_peer(cases: Sequence[Case], pool: GraderPool, threads: int) -> list[GradedCase]:
    def judge(case: Case) -> float:
        keywords = {"gold": case.gold, "gold_form": case.gold_form, "completion": case.completion}
        value = pool.call(_PEER, [keywords])[0]
        return math.nan if isinstance(value, Failure) else value

    return _timed(cases, judge, threads)


def _timed(cases: Sequence[Case], judge: Callable[[Case], float], threads: int) -> list[GradedCase]:
    def one(case: Case) -> GradedCase:
        begin = time.perf_counter()
        reward = judge(case)
        return GradedCase(case, reward, time.perf_counter() - begin)

    with ThreadPoolExecutor(threads) as executor:
        return list(executor.map(one, cases))


def summary(judged: Sequence[GradedCase]) -> dict[str, Any]:
    """Count errors and cases without a verdict; latency quantiles are in seconds."""
    seconds = sorted(j.seconds for j in judged)
    return {
        "cases": len(judged), "accuracy": sum(j.right for j in judged) / len(judged),
        "FP": sum(not j.right and not j.case.expected for j in judged),
        "FN": sum(not j.right and j.case.expected for j in judged),
        "no verdict": sum(math.isnan(j.reward) for j in judged), "p50_s": seconds[len(seconds) // 2],
        "p99_s": seconds[math.ceil(0.99 * len(seconds)) - 1], "max_s": seconds[-1],
    }  # fmt: skip


def table(results: dict[str, Sequence[GradedCase]]) -> str:
    """Format one Markdown row per grader and subset."""
    rows = [
        "| grader | subset | cases | accuracy | FP | FN | no verdict | p50 | p99 | max |",
        "|" + "---|" * 10,
    ]
    for name, judged in results.items():
        for subset in ("plain", "hard", "bomb"):
            part = [j for j in judged if j.case.subset == subset]
            if part:
                s = summary(part)
                rows.append(
                    f"| {name} | {subset} | {s['cases']} | {s['accuracy']:.3f} | {s['FP']} | {s['FN']} | "
                    f"{s['no verdict']} "
                    f"| {1e3 * s['p50_s']:.1f} ms | {1e3 * s['p99_s']:.0f} ms | {s['max_s']:.2f} s |"
                )
    return "\n".join(rows)


def new_false_positives(ours: Sequence[GradedCase], peer: Sequence[GradedCase]) -> list[Case]:
    """Return wrong answers that our grader accepts and the peer rejects."""
    return [
        o.case
        for o, p in zip(ours, peer, strict=True)
        if o.reward == 1.0 and p.reward != 1.0 and not o.case.expected
    ]


def graded_solutions(path: str | Path, pool: GraderPool) -> tuple[int, list[dict[str, Any]]]:
    """Grade solutions whose last line is ``A: 26``, with that answer boxed. Return the number of solutions,
    and the ones whose grade differs from their label.
    """
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    grades = pool.grade([(_with_boxed_answer(row["solution"]), row["answer"]) for row in rows])
    differ = [
        {"grade": grade.outcome, **row}
        for row, grade in zip(rows, grades, strict=True)
        if (grade.reward == 1.0) != row["is_correct"]
    ]
    return len(rows), differ


def _with_boxed_answer(solution: str) -> str:
    _, mark, last = solution.rpartition("A:")
    return f"{solution}\nThe answer is \\boxed{{{last.strip()}}}." if mark else solution


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.evidence.grading", description=__doc__.split("\n")[0]
    )
    parser.add_argument("cases", help="equivalence_cases.jsonl")
    parser.add_argument("solutions", nargs="?", help="gsm8k_graded_solutions.jsonl")
    parser.add_argument("--workers", type=int, default=2, help="grader processes")
    parser.add_argument("--show", action="store_true", help="list misjudged cases")
    arguments = parser.parse_args()
    cases = read_cases(arguments.cases)
    workers = arguments.workers
    with GraderPool(workers, timeout_s=5.0) as pool:
        ours = judge_with_ours(cases, pool, workers)
    with GraderPool(workers, timeout_s=20.0, memory_mb=4096, code_paths=[str(_ROOT)]) as pool:
        peer = judge_with_peer(cases, pool, workers)
    print(table({"grpo-dist": ours, "math-verify, gold boxed, all boxes": peer}))
    print(f"\nwrong answers accepted here and not by math-verify: {len(new_false_positives(ours, peer))}")
    if arguments.show:
        for judged in ours:
            if not judged.right:
                kind = "FN" if judged.case.expected else "FP"
                print(
                    f"{kind} {judged.case.subset:5} {judged.reward:3.0f} {judged.case.gold!r} <- "
                    f"{judged.case.completion!r}"
                )
    if arguments.solutions:
        with GraderPool(workers, timeout_s=5.0) as pool:
            total, differ = graded_solutions(arguments.solutions, pool)
        print(
            f"\n{total} solutions, graded as labelled: {1 - len(differ) / total:.4f} ({len(differ)} differ)"
        )
        for row in differ:
            print(
                f"  gold {row['answer']!r} label {row['is_correct']} here {row['grade']}: "
                f"{row['solution'][-90:]!r}"
            )


if __name__ == "__main__":
    main()
