"""Evaluations that run on separate engines while training continues.

    policy   update k | copy | update k+1 ......... | update k+2 .........
    engines                  load, sample version k ............ | idle
    driver            begin                          log as step k

One evaluation runs at a time: if the next is due earlier, training waits for the running one, and warns.
After its last step a run waits for the last evaluation, but not after a stop request. The run's directory
`evaluation/step_NNNNNN` holds the weights, from the step at which the evaluation is due until its metrics are
written. A checkpoint names the evaluations that are due, so a resumed run repeats exactly these.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from grpo_dist.runtime.concurrency import deadline, run_in_thread, wait_unless_stopped
from grpo_dist.runtime.recorder import Recorder
from grpo_dist.workers import EvaluationHandle

_DIRECTORY = re.compile(r"step_(\d{6,})")
_WARNED_S = 1.0  # shorter waits cause no warning


class ConcurrentEvaluation:
    """The evaluations of one loop.

    Args:
        evaluate: `evaluation.sampling.evaluate` with all its arguments but ``step``.
        save_s: deadline of writing a snapshot, seconds.
    """

    def __init__(
        self,
        handle: EvaluationHandle,
        evaluate: Callable[..., Coroutine[Any, Any, dict[str, float]]],
        recorder: Recorder,
        *,
        save_s: float,
    ) -> None:
        self._handle, self._evaluate, self._recorder, self._save_s = handle, evaluate, recorder, save_s
        self._due: list[int] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def due(self) -> tuple[int, ...]:
        """Return the steps whose evaluations are due and not finished, oldest first."""
        return tuple(self._due)

    async def cancel(self) -> None:
        """Cancel the running evaluation: the resumed run repeats it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def resume(self, step: int, due: Sequence[int], stop_requested: Callable[[], bool]) -> None:
        """Repeat the evaluations ``due`` at the checkpoint of ``step`` that did not finish after it."""
        await self._discard_all_but(due)
        for at in due:
            directory = self._directory(at)
            if not directory.is_dir():
                continue
            if self._handle.has_snapshot(directory) or at == step:
                self._recorder.note(f"the evaluation of step {at} did not finish, and is repeated")
                await self.begin(at, stop_requested)
            else:
                self._recorder.warn(
                    f"the evaluation of step {at} is left out: {directory} has no whole snapshot"
                )
                await self._handle.discard(directory)

    async def begin(self, step: int, stop_requested: Callable[[], bool]) -> None:
        """Begin the evaluation of ``step``; the policy, or its snapshot, has the weights. Waits for the
        running evaluation; after a stop request, the resumed run makes the new one.
        """
        directory = self._directory(step)
        directory.mkdir(parents=True, exist_ok=True)
        self._due.append(step)
        begin = time.perf_counter()
        if not await self.settle(stop_requested) or stop_requested():
            return
        waited = time.perf_counter()
        if waited - begin > _WARNED_S:
            self._recorder.warn(
                f"step {step}: waited {waited - begin:.1f} s for the evaluation before; raise "
                "`evaluation.every`, lower `data.eval.N.max_rows`, or add `evaluation.num_workers`"
            )
        if not self._handle.has_snapshot(directory):
            self._recorder.phase("snapshot")
            await self._handle.snapshot(directory, step)
        spent = {"time/evaluation_wait_s": waited - begin, "time/snapshot_s": time.perf_counter() - waited}
        self._task = asyncio.create_task(self._run(step, spent), name=f"evaluation of step {step}")

    async def settle(self, stop_requested: Callable[[], bool]) -> bool:
        """Wait for the running evaluation; return False on a stop request. Raises the error of the
        evaluation.
        """
        if self._task is None:
            return True
        if not self._task.done():
            self._recorder.phase("evaluate")
        if not await wait_unless_stopped(self._task, stop_requested):
            return False
        self.check()
        return True

    def check(self) -> None:
        """Raise the error of the evaluation, if it has failed."""
        if self._task is not None and self._task.done():
            task, self._task = self._task, None
            task.result()  # bounded: it is done

    async def keep(self, step: int) -> None:
        """Wait until the snapshots of evaluations due before ``step`` are on disk: a checkpoint of ``step``
        has other weights.
        """
        if any(at < step for at in self._due):
            await self._written()

    async def _written(self) -> None:
        async with deadline(self._save_s, "evaluation: the snapshot of its weights is written"):
            await self._handle.written()

    async def _run(self, step: int, spent: dict[str, float]) -> None:
        directory, begin = self._directory(step), time.perf_counter()
        await self._written()
        if not await self._handle.load(directory):
            raise RuntimeError(f"{directory}: its snapshot was deleted while the run used it")
        metrics = await self._evaluate(step=step)
        self._recorder.log(step, metrics | spent | {"time/evaluation_s": time.perf_counter() - begin})
        self._recorder.flush()
        self._due.remove(step)
        await self._handle.discard(directory)

    async def _discard_all_but(self, due: Sequence[int]) -> None:
        """Delete the snapshots of evaluations whose steps the run repeats."""
        for step, directory in _list_snapshots(self._recorder.directory):
            if step not in due:
                await self._handle.discard(directory)

    def _directory(self, step: int) -> Path:
        return self._recorder.directory / "evaluation" / f"step_{step:06d}"


async def discard_snapshots(run_dir: Path) -> None:
    """Delete the snapshots in ``run_dir``, of a run that no longer has evaluation engines."""
    for _, directory in _list_snapshots(run_dir):
        from grpo_dist.policy.snapshots import discard  # imports torch, which a plan does without

        await run_in_thread(partial(discard, directory))


def _list_snapshots(run_dir: Path) -> list[tuple[int, Path]]:
    """Return the steps of due evaluations and their directories, in order."""
    parent = run_dir / "evaluation"
    named = [(_DIRECTORY.fullmatch(path.name), path) for path in parent.iterdir()] if parent.is_dir() else []
    return sorted((int(match[1]), path) for match, path in named if match)
