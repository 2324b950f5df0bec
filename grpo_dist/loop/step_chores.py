"""What the loops of GRPO and of supervised training do around a step: traces, measurements, checkpoints, and
the end of a run that is asked to end.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from grpo_dist.algorithms.schedules import is_due
from grpo_dist.config import CheckpointConfig, ProfileConfig
from grpo_dist.errors import RERUN, Preempted
from grpo_dist.health.watch import TRAINED_TOKENS
from grpo_dist.loop.metrics import throughput_metrics, trained_metrics
from grpo_dist.loop.progress import Progress
from grpo_dist.runtime.concurrency import unless_stopped
from grpo_dist.runtime.metering import Stopwatch
from grpo_dist.runtime.recorder import Recorder
from grpo_dist.types import Group
from grpo_dist.workers import Workers


class Checkpointer(Protocol):
    """`runs.checkpoint.Checkpoints` in production. Writes in the background; `settle` waits for it."""

    async def save(self, step: int, workers: Workers, progress: Progress) -> None: ...
    async def settle(self) -> None: ...


class StagedCounts(Protocol):
    """How much a step trains on: rows, their tokens, those that an update needs, and those in the loss."""

    @property
    def rows(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def needed_tokens(self) -> float: ...
    @property
    def loss_tokens(self) -> int: ...


class Stateful(Protocol):
    """What a checkpoint asks for the state of a loop: `StatefulParts` of the driver's."""

    def progress(self, step: int, *, evaluation_pending: bool) -> Progress: ...


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Which steps are traced, after how many steps a checkpoint is due, and the last step of the run."""

    traced: tuple[int, ...]
    save_every: int
    last: int

    @classmethod
    def of(cls, profile: ProfileConfig, checkpoint: CheckpointConfig, last: int) -> StepTimes:
        return cls(profile.steps, checkpoint.every, last)


class StepChores:
    """Does what the loops of GRPO and of supervised training share: traces, measurements, checkpoints, and
    the end of a run that is asked to end.

    Args:
        state: asked for the state of the loop by a checkpoint.
        stop_requested: true once the run is to save and end.
    """

    def __init__(
        self,
        times: StepTimes,
        workers: Workers,
        recorder: Recorder,
        checkpoints: Checkpointer,
        state: Stateful,
        stop_requested: Callable[[], bool],
    ) -> None:
        self._times = times
        self._workers, self._recorder, self._checkpoints, self._state = workers, recorder, checkpoints, state
        self._stop_requested, self._evaluation_pending = stop_requested, False
        self._saved_step = 0  # of the newest checkpoint; before any, step 0 is nothing to save
        self._left: frozenset[str] = frozenset()  # nodes about to go, for which the state is saved

    async def before_update(self, step: int) -> None:
        """Have the policy trace the update of ``step`` if the profile asks for it."""
        if step in self._times.traced:
            await self._workers.policy.trace_next(self._recorder.directory, step)

    async def _final_metrics(
        self,
        staged: StagedCounts,
        groups: Sequence[Group],
        timer: Stopwatch,
        update: Mapping[str, float],
        *,
        trained: bool,
    ) -> dict[str, float]:
        """Return what is known once the step is made; stop its clock. ``groups``: for the throughput;
        ``update``: metrics of the update.
        """
        usage = self._workers.usage
        metrics = await usage.read() if usage else {}
        metrics |= throughput_metrics(groups, timer.stop())
        if trained:
            metrics |= trained_metrics(staged.rows, staged.tokens, staged.needed_tokens, update)
        metrics[TRAINED_TOKENS] = float(staged.loss_tokens if trained else 0)
        return metrics

    async def _measure(
        self, step: int, phase: str, measurement: Callable[[], Coroutine[Any, Any, dict[str, float]]]
    ) -> None:
        """Record a measurement of ``step``, but not in a run that is asked to end: it has no time, and
        measures after its resume.
        """
        self._evaluation_pending = True
        if self._stop_requested():
            return
        self._recorder.phase(phase)
        found = await unless_stopped(measurement(), self._stop_requested)
        if found is not None:
            self._recorder.log(step, found)
            self._evaluation_pending = False

    async def _save_where_due(self, step: int) -> None:
        """Save after ``step`` where that is due, or a node of the policy is about to go. Raises Preempted in
        a run that is asked to end.
        """
        due = is_due(step, self._times.save_every) or step == self._times.last
        if due or self._stop_requested() or self._node_leaves():
            await self._save(self._progress(step))
        if self._stop_requested():  # asked again: it may have come while saving
            await self._end(step)

    def _node_leaves(self) -> bool:
        """Return whether a node is about to go since the last save."""
        return not self._left.issuperset(self._workers.leaving_nodes())

    async def _save(self, progress: Progress) -> None:
        """Save ``progress``, the state that fits the policy's weights. The caller takes it, before anything
        is awaited: a batch that the loop receives meanwhile would be missing in it.
        """
        step, leaving = progress.step, self._workers.leaving_nodes()
        for node in sorted(leaving - self._left):
            self._recorder.warn(
                f"node {node} of the policy is drained: the state after step {step} is saved at once, and "
                "the run goes on until the node is lost"
            )
        self._left |= leaving
        self._recorder.phase("save")
        self._recorder.flush()
        await self._checkpoints.save(step, self._workers, progress)
        self._saved_step = step

    def _progress(self, step: int) -> Progress:
        return self._state.progress(step, evaluation_pending=self._evaluation_pending)

    async def _end(self, step: int) -> NoReturn:
        await self._checkpoints.settle()
        self._recorder.phase("end")
        raise Preempted(f"ended as asked after step {step}, saved; {RERUN}")
