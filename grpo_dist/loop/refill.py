"""Dynamic sampling in the order of the launch: a group without a signal is replaced as soon as it is found.

    own prompts      p0 signal ....  p1 none  p2 signal  p3 none
    further prompts                     p4 ......... none   p5 signal
                                        (for p1)         p6 (for p4)

Which prompts are launched follows from the groups in launch order, never from which of them ends first. With
``oversample`` 1 they are the shortest start of the order that holds ``wanted`` groups with a signal: n
launches are due only while n - ``wanted`` of the launched groups are known to have none. With more than 1,
each prefix whose groups are all known adds what is due after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from grpo_dist.loop.admission import rounded_up
from grpo_dist.loop.progress import SampledBatch
from grpo_dist.runtime.concurrency import task_group
from grpo_dist.types import Group, Prompt


class Refill:
    """Samples one batch.

    Args:
        sample: samples and scores the group of a prompt.
        has_signal: whether a step can learn from a group.
        prompts: those of the step, then further ones to draw on, in order.
        wanted: groups of the batch, and prompts of the step.
        oversample: once the groups of the step's own prompts are known, so many further prompts are launched
            per group still missing.
    """

    def __init__(
        self,
        sample: Callable[[Prompt], Awaitable[Group]],
        has_signal: Callable[[Group], bool],
        prompts: Sequence[Prompt],
        *,
        wanted: int,
        oversample: float,
    ) -> None:
        self._sample, self._has_signal, self._prompts = sample, has_signal, prompts
        self._wanted, self._oversample = wanted, oversample
        self._launched = 0
        self._groups: dict[int, tuple[Group, bool]] = {}  # and whether it has a signal; by launch
        self._silent = 0
        self._prefix, self._useful = 0, 0  # groups known without a gap, and those of them with a signal

    async def batch(self) -> SampledBatch:
        """Return ``wanted`` groups, those with a signal first, and the rest as discarded. Where the prompts
        run out, groups without a signal fill the batch.
        """
        async with task_group() as tasks:
            self._launch(tasks, self._wanted)
        found = [self._groups[i] for i in range(self._launched)]
        groups = [group for group, useful in found if useful] + [
            group for group, useful in found if not useful
        ]
        return SampledBatch(groups[: self._wanted], groups[self._wanted :])

    def _launch(self, tasks: asyncio.TaskGroup, due: int) -> None:
        while self._launched < min(due, len(self._prompts)):
            tasks.create_task(self._one(tasks, self._launched))
            self._launched += 1

    async def _one(self, tasks: asyncio.TaskGroup, index: int) -> None:
        group = await self._sample(self._prompts[index])
        useful = self._has_signal(group)
        self._groups[index] = group, useful
        self._silent += not useful
        self._launch(tasks, max(self._wanted + self._silent, self._due_by_prefix()))

    def _due_by_prefix(self) -> int:
        """Return how many prompts are due by what the prefix newly shows; 0 where it shows nothing new."""
        due = 0
        while self._prefix in self._groups:
            self._useful += self._groups[self._prefix][1]
            self._prefix += 1
            missing = self._wanted - self._useful
            if self._prefix >= self._wanted and missing > 0:
                due = max(due, self._prefix + rounded_up(missing * self._oversample))
        return due
