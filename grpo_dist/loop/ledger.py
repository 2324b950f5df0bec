"""The outcome of every prompt: `ledger.jsonl` in the run directory, one line per step.

    {"step": 7, "trained": ["gsm8k:12", ...], "no_signal": [...], "unscored": [...], "put_aside": [...]}

A prompt that a step sampled is in exactly one of the lists. With `demonstrations` in the configuration, the
line of a trained step also lists their uids. A resumed run rewrites the lines after its checkpoint, so the
file always describes one uninterrupted run.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_dist.runtime.recorder import LedgerEntry
from grpo_dist.types import Group

DROPPED = "dropped.jsonl"  # in the same directory: rows of the training files that became no prompts, and why
TRAINED, DEMONSTRATIONS = "trained", "demonstrations"
# Why a prompt was sampled and not trained on, as the summary line says it.
REASONS = {
    "no_signal": "zero-variance (all advantages 0)",
    "unscored": "unscored",
    "put_aside": "discarded by dynamic sampling",
    "skipped": "in steps with skipped updates",
}


def ledger_entry(
    groups: Sequence[Group],
    discarded: Iterable[Group],
    *,
    with_signal: Collection[int],
    skipped: bool = False,
    demonstrations: Sequence[str] = (),
) -> LedgerEntry:
    """Sort the uids of a step by the outcome of their groups.

    Args:
        with_signal: indices of ``groups`` that the update learns from.
        skipped: the step, or an update of it, was not trained on.
        demonstrations: uids of the step's demonstrations.
    """
    entry: dict[str, list[str]] = {name: [] for name in (TRAINED, *REASONS)}
    for index, group in enumerate(groups):
        outcome = _outcome(group, has_signal=index in with_signal, skipped=skipped)
        entry[outcome].append(group.prompt.uid)
    entry["put_aside"] = [group.prompt.uid for group in discarded]
    entry[DEMONSTRATIONS] = [] if skipped else list(demonstrations)
    return {name: uids for name, uids in entry.items() if uids}


def _outcome(group: Group, *, has_signal: bool, skipped: bool) -> str:
    if has_signal:
        return "skipped" if skipped else TRAINED
    return "unscored" if np.isnan(group.rewards).all() else "no_signal"


def read(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a ledger, without a last line that a kill cut short; [] if there is no file."""
    if not path.exists():
        return []
    whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [json.loads(line) for line in whole]


def totals(path: Path) -> dict[str, int]:
    """Count the prompts sampled in all steps, by outcome."""
    lines = read(path)
    return {name: sum(len(line.get(name, ())) for line in lines) for name in (TRAINED, *REASONS)}


def summary(path: Path, *, dropped: int = 0) -> str:
    """Describe the totals in one line:

        ledger: 120 prompts sampled = 101 trained + 17 zero-variance (all advantages 0) + 2 unscored

    ``dropped``: rows that became no prompts.
    """
    counts = totals(path)
    parts = [f"{counts[TRAINED]:,} trained"]
    parts += [f"{counts[name]:,} {words}" for name, words in REASONS.items() if counts[name]]
    demonstrations = sum(len(line.get(DEMONSTRATIONS, ())) for line in read(path))
    further = f"; in addition {demonstrations:,} demonstrations" if demonstrations else ""
    if any(counts.values()) and not counts[TRAINED] and not demonstrations:
        further += "; nothing was trained, the weights are unchanged"
    never = f"; {dropped:,} rows dropped before, too long ({DROPPED})" if dropped else ""
    return f"ledger: {sum(counts.values()):,} prompts sampled = {' + '.join(parts)}{further}{never}"


def audit(
    path: Path,
    *,
    steps: int,
    prompts_per_step: int,
    expected_per_step: Callable[[int], Collection[str]] | None = None,
    expected_counts: Mapping[str, int] | None = None,
) -> str | None:
    """Check a finished ledger; return what is wrong, or None.

    Every step must be there once, with the right number of prompts, none of them twice. Two optional checks
    find prompts that are sampled twice in an epoch, or never:

    Args:
        expected_per_step: uids that a step must have, if the step number determines them.
        expected_counts: how often each uid must be sampled in all steps, if dynamic sampling decides when.
    """
    lines = read(path)
    if [line["step"] for line in lines] != list(range(1, steps + 1)):
        return f"{path}: steps {[line['step'] for line in lines]}, expected 1 to {steps}, once each"
    for line in lines:
        lists = {name: uids for name, uids in line.items() if name not in ("step", DEMONSTRATIONS)}
        uids = [uid for entry_uids in lists.values() for uid in entry_uids]
        if len(set(uids)) < len(uids):
            return f"{path}: step {line['step']} has a prompt twice"
        count = len(uids) - len(lists.get("put_aside", ()))
        if count != prompts_per_step:
            return f"{path}: step {line['step']} has {count} prompts, expected {prompts_per_step}"
        missing = set(expected_per_step(line["step"])) - set(uids) if expected_per_step else None
        if missing:
            return f"{path}: step {line['step']} lacks prompt {min(missing)}, which it must have"
    return None if expected_counts is None else _unexpected_count(path, lines, expected_counts)


def _unexpected_count(path: Path, lines: list[dict[str, Any]], expected: Mapping[str, int]) -> str | None:
    counts = Counter(uid for line in lines for name in (TRAINED, *REASONS) for uid in line.get(name, ()))
    for uid in sorted(counts.keys() | expected.keys()):
        if counts[uid] != expected.get(uid, 0):
            return f"{path}: prompt {uid} was sampled {counts[uid]} times, expected {expected.get(uid, 0)}"
    return None
