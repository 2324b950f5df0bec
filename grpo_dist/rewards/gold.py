"""Finds gold answers that are no answers, and counts those that the grader cannot parse, before a run."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from grpo_dist.config import RewardsConfig
from grpo_dist.rewards.pool import GraderPool
from grpo_dist.runtime.hardware import available_cpus

_NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?")  # always parsable; most data sets hold nothing else
_LOOKED_AT = 1000  # enough to detect a wrong column, in seconds even for hard formulas
_NO_ANSWERS = frozenset(  # what public sets write where a problem has no final answer; letters alone count
    re.findall(
        r"\w+",
        """
    proof prove proven proved qed toprove proofomitted prooffound seeproof theproof proofrequired solution
    seesolution seethesolution seesolutionabove seeabove seebelow seetext seeproblem asabove seeexplanation
    notfound answernotfound notavailable notprovided answernotprovided notgiven noanswer noansweravailable
    noanswerfound noanswerprovided noanswergiven answernotavailable missing missinganswer unknown unanswered
    unsolved todo tbd tba none null nan nil omitted placeholder
        """,
    )
)
_NAMED_ROWS = 3  # rows that a message names of each such answer


def is_no_answer(gold: str) -> bool:
    """Return whether a gold says that there is none: ``proof``, ``see solution``, ``N/A``, ``-``."""
    text = re.sub(r"\\(?:boxed|text[a-z]*|mathrm|mbox)(?![A-Za-z])", "", gold)
    if re.fullmatch(r"[\s\-–—?_.…*{}$]*|\W*n\s*[/.]\s*a\W*", text, re.IGNORECASE):
        return True
    return not re.search(r"\d", text) and re.sub(r"[\W_]", "", text).lower() in _NO_ANSWERS


def describe_no_answers(golds: Iterable[tuple[str, str]]) -> str:
    """Return what golds that are no answers are, how often, and in which rows; "" without any.

    ``golds``: pairs of a row's file and number, and its gold.

        'proof' 2 times (train.jsonl:3, train.jsonl:7), 'N/A' once (train.jsonl:9)
    """
    places: dict[str, list[str]] = defaultdict(list)
    for location, gold in golds:
        if is_no_answer(gold):
            places[gold.strip()].append(location)
    parts = []
    for gold, rows in sorted(places.items(), key=lambda item: -len(item[1])):
        times = "once" if len(rows) == 1 else f"{len(rows)} times"
        parts.append(
            f"{gold!r} {times} ({', '.join(rows[:_NAMED_ROWS])}{', ...' if len(rows) > _NAMED_ROWS else ''})"
        )
    return ", ".join(parts)


def count_unreadable(golds: Sequence[str], settings: RewardsConfig) -> tuple[int, int]:
    """Count gold answers that can only be compared as text. Returns (unreadable, examined).

    Examines all plain numbers and the first thousand other answers, in grader processes with the deadline of
    an answer, because some texts hang a parser.
    """
    formulas = [gold for gold in golds if not _NUMBER.fullmatch(gold)]
    asked = formulas[:_LOOKED_AT]
    looked_at = len(golds) - len(formulas) + len(asked)
    if not asked:
        return 0, looked_at
    processes = min(available_cpus(), len(asked))
    with GraderPool(processes, timeout_s=settings.timeout_s, memory_mb=settings.memory_mb) as pool:
        readable = pool.call("grpo_dist.rewards.math:gold_is_parsable", [{"answer": gold} for gold in asked])
    return sum(value != 1.0 for value in readable), looked_at
