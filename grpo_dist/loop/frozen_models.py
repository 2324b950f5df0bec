"""The models that give log-probs of the policy's samples: the reference of the KL term, and teachers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from grpo_dist.config import TeacherConfig
from grpo_dist.runtime.concurrency import gather
from grpo_dist.types import Prompt
from grpo_dist.workers import ReferenceHandle, RolloutsRef, Workers

Logprobs = list[np.ndarray]  # float32 [C] for each row of each sample of a group


class FrozenModels:
    """Asks for the log-probs that a group needs, all at the same time. False where no group needs any.

    Args:
        with_kl: the KL term needs those of the reference.
        teachers: each is asked about the sources it teaches, with the prompt that it reads.
    """

    def __init__(self, workers: Workers, teachers: Sequence[TeacherConfig], *, with_kl: bool) -> None:
        self._reference = workers.reference if with_kl else None
        self._teachers = [(teacher, _handle(workers, teacher)) for teacher in teachers]

    def __bool__(self) -> bool:
        return self._reference is not None or bool(self._teachers)

    async def logprobs(
        self, prompt: Prompt, rollouts: RolloutsRef
    ) -> tuple[Logprobs, Mapping[str, Logprobs]]:
        """Return those of the reference, [] without a KL term, and those of each teacher by name."""
        asked = [] if self._reference is None else [self._reference.logprobs(prompt, rollouts)]
        own = [(teacher.name, handle) for teacher, handle in self._teachers if teacher.teaches(prompt.source)]
        found = await gather(
            [*asked, *(handle.logprobs(_as_read_by(name, prompt), rollouts) for name, handle in own)]
        )
        taught = dict(zip((name for name, _ in own), found[len(asked) :], strict=True))
        return (found[0] if asked else []), taught


def _handle(workers: Workers, teacher: TeacherConfig) -> ReferenceHandle:
    handle = workers.teachers[teacher.name] if teacher.has_workers else workers.reference
    assert handle is not None, "a teacher that is the reference needs one"
    return handle


def _as_read_by(teacher: str, prompt: Prompt) -> Prompt:
    """Return ``prompt`` with the tokens that the teacher reads in its place."""
    token_ids = prompt.teacher_ids.get(teacher)
    return prompt if token_ids is None else replace(prompt, token_ids=token_ids, teacher_ids={})
