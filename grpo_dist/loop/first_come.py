"""Batches of the groups that complete first: `batch.order: completion`.

    launched       for step 0: a b c d e f     for step 1: g h i j     more than a step needs are in flight
    complete first             a c d e                     b f g i
    trained        step 0:     a c d e         step 1:     b f g i     h and j are carried over

A step takes the groups that complete first and leaves the others in flight. It drops none: short answers
complete first, so a run that drops the rest trains on short answers. Admission and waiting bound the
staleness of groups that are carried over:

    deadline    a group launched for step s is trained by step s + max_staleness
    need        groups with a deadline up to d that do not fit into the steps from the next one to d: this
                step waits for them, and takes them
    admission   limits the groups in flight, so that the need never exceeds a step

Which groups a step takes depends on which complete first, so two runs with one seed differ. Every prompt
is still trained once; a checkpoint keeps the complete groups, and a resumed run launches the others again.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from grpo_dist.data.order import UserOrder
from grpo_dist.data.stream import PromptStream
from grpo_dist.loop.groups import ScoredBatch, ScoredGroup
from grpo_dist.loop.pipeline import Pipeline
from grpo_dist.loop.progress import PipelineState
from grpo_dist.loop.sampling_schedule import sampling_used
from grpo_dist.runtime.concurrency import wait_unless_stopped
from grpo_dist.types import Group, Prompt


@dataclass(frozen=True, slots=True)
class Launch:
    """A group in flight: its prompt, the prompt's order index, and the step it was launched for."""

    prompt: Prompt
    index: int
    step: int


def is_complete(due: Mapping[int, int], done: Mapping[int, int], *, step: int, size: int) -> bool:
    """Return whether ``size`` groups are done for ``step``, with all that do not fit into later steps.

    Args:
        due: number of groups in flight, by the last step that may train them.
        done: number of these that are sampled and scored, likewise.
    """
    if sum(done.values()) < size:
        return False
    lacking = 0  # groups due so far that are not done
    for last in sorted(due):
        lacking += due[last] - done.get(last, 0)
        if lacking > size * (last - step):
            return False
    return True


def choice(deadlines: Mapping[str, int], done: Sequence[str], *, step: int, size: int) -> list[str] | None:
    """Choose the ``size`` groups of ``step`` among the ``done``; None while it must wait for others.

    Args:
        deadlines: last step that may train each group in flight, by uid. At most ``size`` * (d - step + 1)
            are due by any step d.
        done: uids that are sampled and scored, in the order of preference.

    Returns:
        The groups that do not fit into later steps, then the first of the others.

        deadlines {a: 0, b: 1, c: 1, d: 1}, step 0, size 2    done [d, c]: None, a is waited for
                                                              done [d, c, a]: [a, d]
    """
    due = Counter(deadlines.values())
    if not is_complete(due, Counter(deadlines[uid] for uid in done), step=step, size=size):
        return None
    chosen: dict[str, None] = {}
    so_far = 0
    for last in sorted(due):
        so_far += due[last]
        need = so_far - size * (last - step) - len(chosen)  # the chosen are due by ``last``, too
        if need > 0:
            ready = (uid for uid in done if deadlines[uid] <= last and uid not in chosen)
            chosen |= dict.fromkeys(islice(ready, need))
    rest = (uid for uid in done if uid not in chosen)
    return [*chosen, *islice(rest, size - len(chosen))]


class DeadlineCounts(Counter[int]):
    """Groups by deadline."""

    def take_off(self, deadline: int) -> None:
        """Remove one group, and drop a count of 0, so that every deadline left has groups."""
        self[deadline] -= 1
        if not self[deadline]:
            del self[deadline]


class Launches:
    """Groups in flight by uid, in launch order, including those that are complete.

    A step may have thousands of groups, and the loop's thread handles each completion. So counts are kept by
    deadline, of which there are few, and a group that completes costs one comparison per deadline:

        by deadline   0    1    2       step 0, which takes 4 groups
        in flight     2    5    3       due by 0: 2, by 1: 7, of which step 1 can take 4: 3 are due now
        complete      1    4    2       1 of 2 by deadline 0: step 0 waits, though 7 are complete

    Args:
        size: groups that a step takes.
        max_staleness: steps that a group may wait for.
    """

    def __init__(self, size: int, max_staleness: int) -> None:
        self._size, self._max_staleness = size, max_staleness
        self._launches: dict[str, Launch] = {}
        self._done: dict[str, ScoredGroup] = {}  # in completion order
        self._silent: set[str] = set()  # zero-variance groups of these
        self._due_by_deadline, self._done_by_deadline = DeadlineCounts(), DeadlineCounts()

    def __len__(self) -> int:
        return len(self._launches)

    def __contains__(self, uid: object) -> bool:
        return uid in self._launches

    @property
    def done(self) -> list[ScoredGroup]:
        """Return the groups that are sampled and scored, in completion order."""
        return list(self._done.values())

    def add(self, launch: Launch) -> None:
        """Count a group as in flight."""
        self._launches[launch.prompt.uid] = launch
        self._due_by_deadline[self._deadline(launch)] += 1

    def finish(self, uid: str, scored: ScoredGroup, *, silent: bool = False) -> None:
        """Note that a group is sampled and scored. ``silent``: zero-variance, so others are preferred."""
        self._done[uid] = scored
        self._done_by_deadline[self._deadline(self._launches[uid])] += 1
        if silent:
            self._silent.add(uid)

    def renew(self, scored: Iterable[ScoredGroup]) -> None:
        """Replace the groups that are `done`, in their order."""
        self._done = dict(zip(self._done, scored, strict=True))

    def remove(self, uid: str) -> Launch:
        """Stop counting a group as in flight, complete or not."""
        launch = self._launches.pop(uid)
        self._due_by_deadline.take_off(self._deadline(launch))
        if self._done.pop(uid, None) is not None:
            self._done_by_deadline.take_off(self._deadline(launch))
            self._silent.discard(uid)
        return launch

    def take(self, uids: Collection[str]) -> list[tuple[Launch, ScoredGroup]]:
        """Remove the groups ``uids``, which are done, and return them in launch order."""
        groups = [(launch, self._done[uid]) for uid, launch in self._launches.items() if uid in uids]
        for launch, _ in groups:
            self.remove(launch.prompt.uid)
        return groups

    def is_complete(self, step: int) -> bool:
        """Return whether ``step`` has its groups, from the counts alone."""
        if len(self._done) < self._size:
            return False
        return is_complete(self._due_by_deadline, self._done_by_deadline, step=step, size=self._size)

    def chosen(self, step: int) -> list[str]:
        """Return the uids of the groups that ``step`` takes. `is_complete` must hold."""
        deadlines = {uid: launch.step + self._max_staleness for uid, launch in self._launches.items()}
        done = sorted(self._done, key=lambda uid: uid in self._silent)
        chosen = choice(deadlines, done, step=step, size=self._size)
        assert chosen is not None, f"step {step} lacks groups"
        return chosen

    def _deadline(self, launch: Launch) -> int:
        return launch.step + self._max_staleness


_TRAINED, _COMPLETE = "trained", "complete"
LengthSums = Mapping[str, tuple[int, int]]  # tokens and samples; of launches in flight by step


class LengthBias:
    """Measures whether a run trains on shorter completions than it launches, by taking the first to complete.

        launched for step 0   lengths 2 4 9      trained so far 2 4 9, and 1 3 of the launch for step 1
        launched for step 1   lengths 1 3 8      bias (2 + 4 + 9 + 1 + 3) / 5 / ((2 + 4 + 9) / 3) - 1 = -24 %

    It compares the mean length of all samples trained so far with the mean length of the launches that have
    no group in flight, whose lengths are all trained. A run that carries slow groups over returns to 0; a run
    that drops them would not. ``state``: the sums of a checkpoint.
    """

    def __init__(self, state: LengthSums) -> None:
        self._sums = {name: (int(tokens), int(samples)) for name, (tokens, samples) in state.items()}

    @property
    def state(self) -> LengthSums:
        return dict(self._sums)

    def trained(self, groups: Iterable[tuple[int, Group]]) -> None:
        """Count groups of a step, each with the step that it was launched for."""
        for launched, group in groups:
            counts = sum([r.num_tokens for r in group.rollouts]), len(group.rollouts)
            self._add(_TRAINED, counts)
            self._add(str(launched), counts)

    def settle(self, in_flight: Collection[int]) -> float | None:
        """Return the bias, as a share of the mean length of complete launches; None before there is one.

        ``in_flight``: launches with groups that are not trained yet.
        """
        current = {_TRAINED, _COMPLETE, *map(str, in_flight)}
        for launch in [name for name in self._sums if name not in current]:
            self._add(_COMPLETE, self._sums.pop(launch))
        trained, complete = self._sums.get(_TRAINED, (0, 0)), self._sums.get(_COMPLETE, (0, 0))
        if not complete[0] or not trained[1]:
            return None
        return (trained[0] / trained[1]) / (complete[0] / complete[1]) - 1.0

    def _add(self, name: str, counts: tuple[int, int]) -> None:
        tokens, samples = self._sums.get(name, (0, 0))
        self._sums[name] = tokens + counts[0], samples + counts[1]


class FirstCome(Pipeline):
    """Groups in flight, each launched by itself; `Pipeline` has batches in launch order."""

    def _restore(self, state: PipelineState, *, first: int) -> None:
        super()._restore(state, first=first)
        self._step = self._label = first  # the next step to train, and the step of the last launch
        self._launches = Launches(self._per_step, self._max_staleness)
        self._running: dict[asyncio.Task[None], None] = {}  # in launch order
        self._replaced: dict[str, tuple[Launch, Group]] = {}  # zero-variance, of the next step
        # Trained or replaced by a step since the last launch: a new group would have the same seeds.
        self._just_taken: set[str] = set()
        self._next_indices: deque[int] = deque()  # order indices to launch next
        self._skipped: list[int] = []  # order indices that came up while their prompts were in flight
        self._target = 0  # groups to have in flight
        self._resumed = [  # step and order index of the groups that a checkpoint had in flight
            (step, index) for step, indices in sorted(self._order_indices.items()) for index in indices
        ]
        self._draws = state.order.position  # draws from an order other than a stream
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._assembling: asyncio.Task[list[str]] | None = None
        self._bias = LengthBias(state.lengths)

    async def launch(self, *, through: int) -> None:
        """Launch groups up to the limit in flight. ``through``: last step to launch for."""
        self._label, self._just_taken = self._step, set()
        self._return_unused()
        self._sampling.setdefault(self._label, self._schedule.of(self._label))
        for step, index in self._resumed:
            self._start(Launch(self._prompt(index), index, step))
        self._resumed = []
        target = min(self._admission.groups, self._per_step * (through - self._step + 1))
        if isinstance(self._order, UserOrder) and len(self._launches) < target:
            # Usually all that this launch and its replacements draw, outside of the loop's thread.
            self._draws += 1
            self._next_indices.extend(await self._take(self._draws - 1))
        self._target = target
        self._fill()

    @property
    def oldest(self) -> asyncio.Task[ScoredBatch] | None:
        """Return None: the groups of the next batch are only known once it is complete."""
        return None

    async def next(self, *, unless: Callable[[], bool] = lambda: False) -> ScoredBatch | None:
        """Wait until the step has its groups, and return them in launch order.

        Returns None as soon as ``unless`` is true while they are not done.
        """
        if self._assembling is None:
            self._assembling = asyncio.create_task(self._assemble(), name=f"batch {self._step}")
        async with self._deadline(self._step):
            if not await wait_unless_stopped(self._assembling, unless):
                return None
        chosen = set(self._assembling.result())  # bounded: it is done
        self._assembling = None
        groups = self._launches.take(chosen)
        launches = [launch for launch, _ in groups]
        batch = ScoredBatch([scored for _, scored in groups], [group for _, group in self._replaced.values()])
        gone = [*launches, *(launch for launch, _ in self._replaced.values())]
        self._just_taken |= chosen | self._replaced.keys()
        self._replaced = {}
        self._return_unused()
        self._forget(gone)
        self._order.trained([launch.index for launch in gone], batch.sampled)
        self._schedule.observe(batch.sampled, sampling_used(batch.sampled, self._sampling[self._label]))
        metrics = self._metrics(launches, batch.groups)
        self._step, self._target = self._step + 1, self._target - self._per_step
        return replace(batch, metrics=metrics)

    async def settle(self, *, unless: Callable[[], bool] = lambda: False) -> bool:
        """As `Pipeline.settle`."""
        return not self._drains or await self._all_done(unless)

    async def renew_reference(self, refresh: Callable[[], Awaitable[None]]) -> None:
        """As `Pipeline.renew_reference`."""
        await self._all_done(lambda: False)
        await refresh()
        async with self._deadline(self._step):
            renewed = await self._scorer.renew(ScoredBatch(self._launches.done))
        self._launches.renew(renewed.scored)

    def state(self) -> PipelineState:
        """Return what a checkpoint keeps: the groups that are done, the order indices of all groups in
        flight, which a resumed run launches again, and the state of the order.
        """
        self._return_unused()
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
        """Cancel all groups in flight; `state` keeps the groups that are done."""
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
                    if not await wait_unless_stopped(task, unless):
                        return False
            await asyncio.sleep(0)  # lets `_note_end` run for the last task
        if self._failure is not None:
            raise self._failure
        return True

    def _forget(self, gone: Sequence[Launch]) -> None:
        """Drop the state of a step's groups, trained or replaced."""
        indices: dict[int, set[int]] = {}
        for launch in gone:
            indices.setdefault(launch.step, set()).add(launch.index)
            self._scorer.forget(launch.step, launch.prompt.uid)
        for step, forgotten in indices.items():
            self._order_indices[step] = [i for i in self._order_indices[step] if i not in forgotten]
        self._order_indices = {step: left for step, left in self._order_indices.items() if left}
        steps = {self._label, *self._order_indices}
        for step in [step for step in self._sampling if step not in steps]:
            del self._sampling[step]

    def _metrics(self, launches: Sequence[Launch], groups: Sequence[Group]) -> dict[str, float]:
        self._bias.trained(zip((launch.step for launch in launches), groups, strict=True))
        # Replacements of groups in flight add to the last launch.
        growing = [self._label] if self._launches else []
        bias = self._bias.settle({*self._order_indices, *growing})
        waited = [self._step - launch.step for launch in launches]
        metrics = {
            "group/carried_over": float(len(self._launches)),
            "group/waited_steps": sum(waited) / len(waited),
        }
        return metrics if bias is None else metrics | {"rollout/length_bias": bias}

    def _prompt(self, index: int) -> Prompt:
        return self._prompts[self._order.prompt(index)]

    def _fill(self) -> None:
        while len(self._launches) < self._target:
            launch = self._draw()
            self._order_indices.setdefault(self._label, []).append(launch.index)
            self._start(launch)

    def _start(self, launch: Launch) -> None:
        self._launches.add(launch)
        task = asyncio.create_task(self._run(launch), name=f"group {launch.prompt.uid} of step {launch.step}")
        self._running[task] = None
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self._changed.set()

    async def _run(self, launch: Launch) -> None:
        """Sample and score a group; replace it if it is zero-variance and the step may replace one more."""
        uid, has_signal = launch.prompt.uid, True
        if self._dynamic is None:
            scored = await self._scorer.sample_and_score(launch.prompt, launch.step)
        else:
            group = await self._scorer.sample_and_grade(launch.prompt, launch.step)
            has_signal = self._has_signal(group)
            if not has_signal and len(self._replaced) < self._admission.replacements:
                self._launches.remove(uid)
                self._replaced[uid] = launch, group
                self._fill()
                self._note_change()
                return
            scored = await self._scorer.add_logprobs(group)
        self._launches.finish(uid, scored, silent=not has_signal)
        self._note_change()

    def _note_change(self) -> None:
        if self._launches.is_complete(self._step):
            self._changed.set()

    def _draw(self) -> Launch:
        """Return the launch of the next prompt that is not in flight.

        An order other than a stream gives as many at once as a launch may need.
        """
        for _ in range(4 * len(self._prompts) + 4):
            if not self._next_indices:
                self._next_indices.extend(self._order.take(self._draws))
                self._draws += 1
            index = self._next_indices.popleft()
            prompt = self._prompt(index)
            uid = prompt.uid
            if not (uid in self._launches or uid in self._just_taken or uid in self._replaced):
                return Launch(prompt, index, self._label)
            self._skipped.append(index)
        in_use = len(self._launches) + len(self._just_taken) + len(self._replaced)
        raise RuntimeError(f"the prompt order gave only the {in_use} prompts that are in flight")

    def _return_unused(self) -> None:
        """Return unused indices to the order: their prompts may be free by the next launch, which draws them
        again.
        """
        if isinstance(self._order, PromptStream):  # it gives each index once
            self._order.trained([*self._skipped, *self._next_indices], [])
        self._skipped, self._next_indices = [], deque()


PIPELINES: Mapping[str, type[Pipeline]] = {"launched": Pipeline, "completion": FirstCome}  # `batch.order`
