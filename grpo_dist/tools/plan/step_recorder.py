"""The recorder of a simulated run: it keeps the time and the tokens of each step, and writes nothing."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_dist.batch.token_values import ValuesOfSamples
from grpo_dist.runtime.metering import Span, Usage
from grpo_dist.runtime.recorder import LedgerEntry
from grpo_dist.tools.plan import fake_records
from grpo_dist.tools.plan.trace import SimulationTrace
from grpo_dist.types import Group


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """``end``: seconds since the run began. ``tokens``: of prompts and completions."""

    end: float
    tokens: int
    completion_tokens: int
    samples: int
    staleness: float
    length_bias: float  # NaN without `batch.order` finished


class StepRecorder:
    directory = Path()  # nothing is written there

    def __init__(self, trace: SimulationTrace) -> None:
        self._trace, self._loop = trace, asyncio.get_running_loop()
        self._samples = self._tokens = self._completion_tokens = 0  # of the step that is logged next
        self.steps: list[SimulatedStep] = []
        self.logged = 0  # steps, including those that are repeated after a failure

    def samples(self, name: str, groups: list[Group], values: ValuesOfSamples | None = None) -> None:
        with self._trace.excluded():
            self._samples = sum(len(g.rollouts) for g in groups)
            self._tokens = sum(int(g.prompt.token_ids[0]) * len(g.rollouts) for g in groups)
            self._completion_tokens = sum(sum(fake_records.tokens_of(g.rollouts)) for g in groups)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.logged += 1
        self.steps.append(
            SimulatedStep(
                self._loop.time(),
                self._tokens + self._completion_tokens,
                self._completion_tokens,
                self._samples,
                metrics["rollout/staleness_mean"],
                metrics.get("rollout/length_bias", math.nan),
            )
        )

    def back_to(self, step: int) -> None:
        del self.steps[step:]

    def spans(self, step: int, own: Sequence[Span], workers: Mapping[str, Usage]) -> None:
        """Ignore the driver's spans: the trace has those of the workers."""

    def ledger(self, step: int, entry: LedgerEntry) -> None:
        """Keep no ledger."""

    def quarantine(self, step: int, groups: list[Group]) -> str:
        return "nowhere"

    def warn(self, message: str) -> None:
        """Ignore warnings: a simulated run has no health to watch."""

    def note(self, message: str) -> None:
        """Ignore events."""

    def flush(self) -> None:
        """Write nothing."""

    def phase(self, name: str) -> None:
        """Show nothing."""
