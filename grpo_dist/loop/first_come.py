"""Batches of the groups that are done first: `batch.order: completion`.

    launched    for step 0: a b c d e f     for step 1: g h i j     more than a step needs are on their way
    done first              a c d e                     b f g i
    trained     step 0:     a c d e         step 1:     b f g i     h and j are carried over

A step takes the groups that are done first and leaves the others on their way. It drops none: short answers
are done first, so a run that drops the rest trains on short answers. A group that is carried over is bounded
in its staleness by admission and by waiting:

    deadline    a group launched for step s is trained by step s + max_staleness
    need        of the groups with a deadline up to d, those that the steps from the next one to d have no
                place for: they are taken now, and waited for
    admission   so few are on their way that the need never exceeds a step

Which groups a step takes depends on which are done first, so two runs of one seed differ. Every prompt is
trained once all the same; a checkpoint keeps the groups that are done, and a resumed run launches the others
again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from grpo_dist.data.stream import PromptStream
from grpo_dist.loop.admission import Admission
from grpo_dist.loop.groups import ScoredBatch
from grpo_dist.loop.launches import Launch, Launches
from grpo_dist.loop.length_bias import LengthBias
from grpo_dist.loop.pipeline import Pipeline
from grpo_dist.loop.progress import PipelineState
from grpo_dist.loop.sampling_schedule import drawn_with
from grpo_dist.runtime.concurrency import finished_unless_stopped
from grpo_dist.types import Group, Prompt


class FirstCome(Pipeline):
    """Groups on their way, each launched by itself: in place of `Pipeline`, the batches in launch order."""

    def _restore(self, state: PipelineState, *, first: int) -> None:
        super()._restore(state, first=first)
        bounds = Admission.of(
            self._batch_config,
            self._dynamic,
            max_staleness=self._max_staleness,
            prompts=self._most_at_once,
        )
        self._most, self._extra = bounds.most, bounds.extra
        self._step = self._label = first  # the next to train, and that of the last launch
        self._launches = Launches(self._per_step, self._max_staleness)
        self._running: dict[asyncio.Task[None], None] = {}  # in launch order
        self._aside: dict[str, tuple[Launch, Group]] = {}  # no signal, and replaced; of the step to come
        # Trained or replaced by a step since the last launch: another group would have their seeds.
        self._just_taken: set[str] = set()
        self._drawn: deque[int] = deque()  # order indices to launch next
        self._held: list[int] = []  # those that came up while their prompts were on their way
        self._wanted = 0  # groups that are to be on their way
        self._resumed = [  # step and order index of those that a checkpoint had on their way
            (step, index) for step, indices in sorted(self._order_indices.items()) for index in indices
        ]
        self._draws = state.order.position  # from an order that is no stream
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._assembling: asyncio.Task[list[str]] | None = None
        self._bias = LengthBias(state.lengths)

    async def launch(self, *, through: int) -> None:
        """Launch groups until as many are on their way as may be. ``through``: last step to launch for."""
        self._label, self._just_taken = self._step, set()
        self._return_drawn()
        self._sampling.setdefault(self._label, self._schedule.of(self._label))
        for step, index in self._resumed:
            self._start(Launch(self._prompt(index), index, step))
        self._resumed = []
        self._wanted = min(self._most, self._per_step * (through - self._step + 1))
        self._fill()

    @property
    def oldest(self) -> asyncio.Task[ScoredBatch] | None:
        """None: the groups of the next batch are known when it is taken."""
        return None

    async def next(self, *, unless: Callable[[], bool] = lambda: False) -> ScoredBatch | None:
        """Wait until the step has its groups, and return them in launch order.

        Returns None as soon as ``unless`` is true while they are not done.
        """
        if self._assembling is None:
            self._assembling = asyncio.create_task(self._assemble(), name=f"batch {self._step}")
        async with self._deadline(self._step):
            if not await finished_unless_stopped(self._assembling, unless):
                return None
        chosen = set(self._assembling.result())  # bounded: it is done
        self._assembling = None
        taken = self._launches.take(chosen)
        launches = [own for own, _ in taken]
        batch = ScoredBatch([scored for _, scored in taken], [group for _, group in self._aside.values()])
        gone = [*launches, *(own for own, _ in self._aside.values())]
        self._just_taken |= chosen | self._aside.keys()
        self._aside = {}
        self._return_drawn()
        self._forget(gone)
        self._order.trained([own.index for own in gone], batch.sampled)
        self._schedule.observe(batch.sampled, drawn_with(batch.sampled, self._sampling[self._label]))
        metrics = self._metrics(launches, batch.groups)
        self._step, self._wanted = self._step + 1, self._wanted - self._per_step
        return replace(batch, metrics=metrics)

    async def settle(self, *, unless: Callable[[], bool] = lambda: False) -> bool:
        """As `Pipeline.settle`."""
        return not self._drains or await self._all_done(unless)

    async def renew_reference(self, refresh: Callable[[], Awaitable[None]]) -> None:
        """As `Pipeline.renew_reference`."""
        await self._all_done(lambda: False)
        await refresh()
        async with self._deadline(self._step):
            renewed = await self._scorer.renewed(ScoredBatch(self._launches.done))
        self._launches.renew(renewed.scored)

    def state(self) -> PipelineState:
        """Return what a checkpoint keeps: the groups that are done, the order indices of all that are on
        their way, which a resumed run launches again, and the state of the order.
        """
        self._return_drawn()
        done = {step: self._scorer.finished(step) for step in self._order_indices}
        order = self._order.state
        if not isinstance(self._order, PromptStream):
            order = replace(order, position=self._draws)
        return PipelineState(
            partial={step: groups for step, groups in done.items() if groups},
            order_indices={step: list(indices) for step, indices in self._order_indices.items()},
            order=order,
            sampling=dict(self._sampling),
            schedule=self._schedule.state,
            lengths=self._bias.state,
        )

    async def cancel(self) -> None:
        """Cancel what is in flight; `state` keeps the groups that are done."""
        tasks = [*self._running, *([self._assembling] if self._assembling else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _assemble(self) -> list[str]:
        """Wait for the groups of the step; return their uids. Raises what a group raised."""
        while True:
            if self._failure is not None:
                raise self._failure
            if self._launches.is_complete(self._step):
                return self._launches.chosen(self._step)
            self._changed.clear()
            await self._changed.wait()  # bounded: by the deadline that `next` has for the batch

    async def _all_done(self, unless: Callable[[], bool]) -> bool:
        """Wait until nothing is in flight; False as soon as ``unless`` is true while something is."""
        while running := list(self._running):
            for task in running:
                async with self._deadline(self._step):
                    if not await finished_unless_stopped(task, unless):
                        return False
            await asyncio.sleep(0)  # until `_note_end` knows the last of them
        if self._failure is not None:
            raise self._failure
        return True

    def _forget(self, gone: Sequence[Launch]) -> None:
        """Drop what is kept of the groups of a step: those trained, and those that were replaced."""
        indices: dict[int, set[int]] = {}
        for own in gone:
            indices.setdefault(own.step, set()).add(own.index)
            self._scorer.forget(own.step, own.prompt.uid)
        for step, those in indices.items():
            self._order_indices[step] = [i for i in self._order_indices[step] if i not in those]
        self._order_indices = {step: left for step, left in self._order_indices.items() if left}
        kept = {self._label, *self._order_indices}
        for step in [step for step in self._sampling if step not in kept]:
            del self._sampling[step]

    def _metrics(self, launches: Sequence[Launch], groups: Sequence[Group]) -> dict[str, float]:
        self._bias.trained(zip((own.step for own in launches), groups, strict=True))
        # A group on its way may be replaced, and the last launch grows.
        growing = [self._label] if self._launches else []
        bias = self._bias.settle({*self._order_indices, *growing})
        waited = [self._step - own.step for own in launches]
        metrics = {
            "group/carried_over": float(len(self._launches)),
            "group/waited_steps": sum(waited) / len(waited),
        }
        return metrics if bias is None else metrics | {"rollout/length_bias": bias}

    def _prompt(self, index: int) -> Prompt:
        return self._prompts[self._order.prompt(index)]

    def _fill(self) -> None:
        while len(self._launches) < self._wanted:
            own = self._draw()
            self._order_indices.setdefault(self._label, []).append(own.index)
            self._start(own)

    def _start(self, own: Launch) -> None:
        self._launches.add(own)
        task = asyncio.create_task(self._run(own), name=f"group {own.prompt.uid} of step {own.step}")
        self._running[task] = None
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self._changed.set()

    async def _run(self, own: Launch) -> None:
        """Sample and score a group; replace it if it has no signal and the step may replace one more."""
        uid, has_signal = own.prompt.uid, True
        if not self._dynamic.enabled:
            scored = await self._scorer.scored_group(own.prompt, own.step)
        else:
            group = await self._scorer.group(own.prompt, own.step)
            has_signal = self._has_signal(group)
            if not has_signal and len(self._aside) < self._extra:
                self._launches.remove(uid)
                self._aside[uid] = own, group
                self._fill()
                self._note_change()
                return
            scored = await self._scorer.referenced(group)
        self._launches.finish(uid, scored, silent=not has_signal)
        self._note_change()

    def _note_change(self) -> None:
        if self._launches.is_complete(self._step):
            self._changed.set()

    def _draw(self) -> Launch:
        """Return the launch of the next prompt that is not on its way.

        An order that is no stream gives as many at once as a launch may need.
        """
        for _ in range(4 * len(self._prompts) + 4):
            if not self._drawn:
                self._drawn.extend(self._order.take(self._draws))
                self._draws += 1
            index = self._drawn.popleft()
            prompt = self._prompt(index)
            uid = prompt.uid
            if not (uid in self._launches or uid in self._just_taken or uid in self._aside):
                return Launch(prompt, index, self._label)
            self._held.append(index)
        taken = len(self._launches) + len(self._just_taken) + len(self._aside)
        raise RuntimeError(f"the prompt order gave none but the {taken} prompts that are on their way")

    def _return_drawn(self) -> None:
        """Return to the order what it gave too early, since the prompts may be free from now on; the next
        launch draws again.
        """
        if isinstance(self._order, PromptStream):  # it gives each once
            self._order.trained([*self._held, *self._drawn], [])
        self._held, self._drawn = [], deque()


PIPELINES: Mapping[str, type[Pipeline]] = {"launched": Pipeline, "completion": FirstCome}  # `batch.order`
