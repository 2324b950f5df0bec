"""What became of every prompt: `ledger.jsonl` in the run directory, a line for each step.

    {"step": 7, "trained": ["gsm8k:12", ...], "no_signal": [...], "unscored": [...], "put_aside": [...]}

A prompt that a step sampled is in exactly one of the lists. A resumed run repeats the steps after its
checkpoint, and their lines with them, so that the file always tells of one uninterrupted run.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_dist.types import Group

DROPPED = "dropped.jsonl"  # beside it: rows of the training files that became no prompts, and why
TRAINED = "trained"
# Why a prompt was sampled and not trained on, in the words of the closing line.
REASONS = {
    "no_signal": "without signal (no advantage but 0)",
    "unscored": "unscored",
    "put_aside": "put aside by dynamic sampling",
    "skipped": "in steps with updates that were not made",
}
Account = Mapping[str, Sequence[str]]


def account(
    groups: Sequence[Group], discarded: Iterable[Group], *, taught: Collection[int], skipped: bool = False
) -> Account:
    """Uids by what became of their groups.

    Args:
        taught: which of ``groups`` have a sample whose advantage is not 0.
        skipped: the step, or an update of it, was not trained on.
    """
    found: dict[str, list[str]] = {name: [] for name in (TRAINED, *REASONS)}
    for index, group in enumerate(groups):
        found[_fate(group, taught=index in taught, skipped=skipped)].append(group.prompt.uid)
    found["put_aside"] = [group.prompt.uid for group in discarded]
    return {name: uids for name, uids in found.items() if uids}


def _fate(group: Group, *, taught: bool, skipped: bool) -> str:
    if taught:
        return "skipped" if skipped else TRAINED
    return "unscored" if np.isnan(group.rewards).all() else "no_signal"


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a ledger, without a last one that a kill has torn; none where there is no file."""
    if not path.exists():
        return []
    whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [json.loads(line) for line in whole]


def totals(path: Path) -> dict[str, int]:
    """Prompts sampled in all steps, by what became of them."""
    lines = read(path)
    return {name: sum(len(line.get(name, ())) for line in lines) for name in (TRAINED, *REASONS)}


def summary(path: Path, *, dropped: int = 0) -> str:
    """ledger: 120 prompts sampled = 101 trained + 17 without signal (no advantage but 0) + 2 unscored

    ``dropped``: rows that became no prompts.
    """
    found = totals(path)
    parts = [f"{found[TRAINED]:,} trained"]
    parts += [f"{found[name]:,} {words}" for name, words in REASONS.items() if found[name]]
    never = f"; {dropped:,} rows dropped before, too long ({DROPPED})" if dropped else ""
    return f"ledger: {sum(found.values()):,} prompts sampled = {' + '.join(parts)}{never}"


def imbalance(
    path: Path,
    *,
    steps: int,
    prompts_per_step: int,
    turns: Callable[[int], Collection[str]] | None = None,
    often: Mapping[str, int] | None = None,
) -> str | None:
    """What is wrong with the books: a step that is missing or there twice, a prompt that is in two lists of a
    step, a step that has not the prompts it was to have. None: they balance.

    What tells of a prompt that is sampled twice in an epoch or never, too: ``turns``, uids whose turn a step
    is, where that follows from its number; ``often``, how often each uid was to be sampled in all steps,
    where dynamic sampling decides when.
    """
    lines = read(path)
    if [line["step"] for line in lines] != list(range(1, steps + 1)):
        return f"{path}: steps {[line['step'] for line in lines]}, expected 1 to {steps}, once each"
    for line in lines:
        lists = {name: uids for name, uids in line.items() if name != "step"}
        uids = [uid for own in lists.values() for uid in own]
        if len(set(uids)) < len(uids):
            return f"{path}: step {line['step']} has a prompt twice"
        own = len(uids) - len(lists.get("put_aside", ()))
        if own != prompts_per_step:
            return f"{path}: step {line['step']} has {own} prompts, expected {prompts_per_step}"
        missed = set(turns(line["step"])) - set(uids) if turns else None
        if missed:
            return f"{path}: step {line['step']} has not prompt {min(missed)}, whose turn it is"
    return None if often is None else _sampled_otherwise(path, lines, often)


def _sampled_otherwise(path: Path, lines: list[dict[str, Any]], often: Mapping[str, int]) -> str | None:
    found = Counter(uid for line in lines for name in (TRAINED, *REASONS) for uid in line.get(name, ()))
    for uid in sorted(found.keys() | often.keys()):
        if found[uid] != often.get(uid, 0):
            return f"{path}: prompt {uid} was sampled {found[uid]} times, expected {often.get(uid, 0)}"
    return None
