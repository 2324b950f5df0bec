"""Score rows with the rewards of a configuration, in one lane per grader process.

rows --> lane: Scorer + one killable process --> Scored      a lane takes one row at a time, so that
    \\--> lane: Scorer + one killable process --> Scored      times of rows do not mix
"""

from __future__ import annotations

import queue
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from grpo_dist.config import RewardsConfig, SamplingConfig
from grpo_dist.rewards.by_source import scorers_by_source
from grpo_dist.rewards.group import CompletionGroup
from grpo_dist.rewards.pool import GraderPool
from grpo_dist.rewards.registry import Scorer, Scores, placed
from grpo_dist.rewards.thought import shown_by
from grpo_dist.runtime.stage_log import note
from grpo_dist.tools.scoring.rows import CompletionRow

# Rewards that need tokens of the policy, not only text.
OF_TOKENS = ("overlong", "overlong_share", "cosine_length", "relative_length", "repetition")


@dataclass(frozen=True, slots=True)
class Scored:
    """The scores of a row, and the ``seconds`` that scoring took."""

    row: CompletionRow
    scores: Scores
    seconds: float

    @property
    def seconds_each(self) -> float:
        return self.seconds / len(self.row.completions)


@dataclass(frozen=True)
class Outcome:
    """All scores. ``failures``: by reward, how often each error message occurred."""

    scored: list[Scored]
    seconds: float  # wall clock, without the start of processes
    processes: int
    failures: dict[str, Counter[str]] = field(default_factory=dict)

    def rewards(self) -> np.ndarray:
        """Return the total of each completion: float64 [N], NaN for unscored."""
        return np.concatenate([s.scores.rewards for s in self.scored]).astype(float)

    def parts(self) -> dict[str, np.ndarray]:
        """Return each reward of each completion: float64 [N], NaN for unscored and where `has` is False."""
        names = dict.fromkeys(name for s in self.scored for name in s.scores.parts)
        return {
            name: np.concatenate([s.scores.parts.get(name, np.full(len(s.row.completions), np.nan))
                                  for s in self.scored]).astype(float)
            for name in names
        }  # fmt: skip

    def has(self, name: str) -> np.ndarray:
        """Return whether the source of each completion has the reward ``name``: bool [N]."""
        return np.array([name in s.scores.parts for s in self.scored for _ in s.row.completions])

    def sources(self) -> np.ndarray:
        """Return the source of each completion: text [N]."""
        return np.array([s.row.source for s in self.scored for _ in s.row.completions])


def score_rows(
    rows: Sequence[CompletionRow],
    rewards: RewardsConfig,
    sampling: SamplingConfig,
    tokenizer: Any,
    *,
    processes: int,
) -> Outcome:
    """Score ``rows`` in order. ``tokenizer``: the policy's; None when no reward needs tokens."""
    settings = placed(rewards)
    used = {row.source if row.source in rewards.by_source else "" for row in rows}
    # No reward models here.
    variants = {source: settings.of(source).model_copy(update={"models": ()}) for source in used}
    with ExitStack() as stack:
        lanes: queue.Queue[dict[str, Scorer]] = queue.Queue()
        made: list[Scorer] = []
        for _ in range(processes):
            pool = stack.enter_context(
                GraderPool(
                    1,
                    timeout_s=settings.timeout_s,
                    memory_mb=settings.memory_mb,
                    code_paths=settings.code_paths,
                    accept_arithmetic=settings.accept_arithmetic,
                )
            )
            lane = scorers_by_source(variants, pool, workers=processes)
            for scorer in lane.values():
                stack.callback(scorer.close)
            pool.grade([("\\boxed{1}", "1")])  # starts the process, outside of the measured time
            made += lane.values()
            lanes.put(lane)

        def one(row: CompletionRow) -> Scored:
            group = _group(row, rewards, sampling, tokenizer)
            lane = lanes.get()  # bounded: there is a lane for every thread
            scorer = lane[row.source if row.source in lane else ""]
            try:
                begin = time.perf_counter()
                return Scored(row, scorer.score(group), time.perf_counter() - begin)
            finally:
                lanes.put(lane)

        begin = time.perf_counter()
        scored = []
        with ThreadPoolExecutor(processes) as threads:
            for own in threads.map(one, rows):
                scored.append(own)
                note(f"{len(scored)} of {len(rows)} rows")
        seconds = time.perf_counter() - begin
        failures: dict[str, Counter[str]] = {}
        for scorer in made:
            for name, messages in scorer.failures.items():
                failures.setdefault(name, Counter()).update(messages)
        return Outcome(scored, seconds, processes, failures)


def _group(
    row: CompletionRow, rewards: RewardsConfig, sampling: SamplingConfig, tokenizer: Any
) -> CompletionGroup:
    ids = [tokenizer(c, add_special_tokens=False)["input_ids"] if tokenizer else [] for c in row.completions]
    return CompletionGroup(
        completions=row.completions,
        token_ids=tuple(np.asarray(own, np.int32) for own in ids),
        finish_reasons=row.finish_reasons,
        gold=row.answer,
        columns=row.columns,
        max_new_tokens=sampling.longest,
        thought=shown_by(row.completions, rewards),
        turns=row.turns,
        source=row.source,
    )
