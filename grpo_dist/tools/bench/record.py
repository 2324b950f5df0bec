"""Records every step of a benchmark."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_dist.batch.token_values import ValuesOfSamples
from grpo_dist.loop.progress import Progress
from grpo_dist.runtime.metering import Span, Usage
from grpo_dist.runtime.recorder import Recorder
from grpo_dist.runtime.seeds import request_seed
from grpo_dist.types import Group
from grpo_dist.workers import Workers


@dataclass(frozen=True, slots=True)
class Request:
    """One sample of a step. ``length``: sampled tokens. ``given``: the environment's tokens."""

    prompt_ids: tuple[int, ...]
    seed: int
    length: int
    given: int = 0

    @property
    def tokens(self) -> int:
        return len(self.prompt_ids) + self.length + self.given


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step, from the end of the previous one to its end, including logging; seconds of `time.time`."""

    step: int
    begin: float
    end: float
    metrics: dict[str, float]
    usage: dict[str, Usage]
    requests: tuple[Request, ...]

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class NoCheckpoints:
    """A checkpointer that saves nothing."""

    async def save(self, step: int, workers: Workers, progress: Progress) -> None: ...

    async def settle(self) -> None: ...


class BenchRecorder(Recorder):
    """The recorder of a benchmark; its clock starts at construction."""

    def __init__(self, seed: int, directory: Path, say: Callable[[int, dict[str, float]], None]) -> None:
        self._seed, self._say, self.directory = seed, say, directory
        self._last, self._requests = time.time(), tuple[Request, ...]()
        self._usage: dict[str, Usage] = {}
        self.steps: list[StepRecord] = []

    def warn(self, message: str) -> None:
        print(message, file=sys.stderr, flush=True)

    def spans(self, step: int, loop_spans: Sequence[Span], workers: Mapping[str, Usage]) -> None:
        self._usage = dict(workers)

    def samples(self, name: str, groups: list[Group], values: ValuesOfSamples | None = None) -> None:
        batch = len(self.steps)
        self._requests = tuple(
            Request(
                tuple(group.prompt.token_ids.tolist()),
                request_seed(self._seed, batch, group.prompt.uid, rollout.sample),
                rollout.num_sampled,
                rollout.num_tokens - rollout.num_sampled,
            )
            for group in groups
            for rollout in group.rollouts
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        now = time.time()
        self.steps.append(StepRecord(step, self._last, now, metrics, self._usage, self._requests))
        self._last = now
        self._say(step, metrics)
