"""The models that give log-probs of the policy's samples: the reference of the KL term, and teachers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from grpo_dist.config import DistillationConfig, TeacherConfig
from grpo_dist.runtime.concurrency import gather
from grpo_dist.types import Prompt, TeacherLogprobs
from grpo_dist.workers import ReferenceHandle, RolloutsRef, Workers

_AS_POLICY = ""  # the reference, with the prompt that the policy reads; no teacher has this name
# Of each row of each sample of a group.
Logprobs = list[np.ndarray]  # float32 [C]
TeacherRows = list[TeacherLogprobs]


class FrozenModels:
    """Asks for the log-probs that a group needs, all at the same time. False where no group needs any.

    Args:
        with_kl: the KL term needs those of the reference.
        distillation: each of its teachers is asked about the sources it teaches, with the prompt that it
            reads.
    """

    def __init__(self, workers: Workers, distillation: DistillationConfig, *, with_kl: bool) -> None:
        self._reference = workers.reference if with_kl else None
        self._teachers = [(teacher, _handle(workers, teacher)) for teacher in distillation.teachers]
        self._top_k = distillation.top_k

    def __bool__(self) -> bool:
        return self._reference is not None or bool(self._teachers)

    async def logprobs(
        self, prompt: Prompt, rollouts: RolloutsRef, before: Mapping[str, TeacherRows] | None = None
    ) -> tuple[Logprobs, Mapping[str, TeacherRows]]:
        """Return those of the reference, [] without a KL term, and those of each teacher by name.

        The reference is asked once about the prompt that the policy reads, for the KL term and for teachers.

        Args:
            before: of the teachers, of the same samples, before the reference changed: teachers with models
                of their own are not asked again.
        """
        own = [(teacher, handle) for teacher, handle in self._teachers if teacher.teaches(prompt.source)]
        known = {t.name: before[t.name] for t, _ in own if before and t.has_workers and t.name in before}
        asked = {}
        for teacher, handle in own:
            name = _asked_as(teacher, prompt)
            if name not in known and name not in asked:
                asked[name] = self._taught(handle, _as_read_by(teacher.name, prompt), rollouts)
        if self._reference is not None and _AS_POLICY not in asked:
            asked[_AS_POLICY] = _plain(self._reference, prompt, rollouts)
        found = known | dict(zip(asked, await gather(asked.values()), strict=True))
        taught = {teacher.name: found[_asked_as(teacher, prompt)] for teacher, _ in own}
        reference = [] if self._reference is None else found[_AS_POLICY]
        return [row.sampled for row in reference], taught

    async def _taught(self, handle: ReferenceHandle, prompt: Prompt, rollouts: RolloutsRef) -> TeacherRows:
        if self._top_k:
            return await handle.top_logprobs(prompt, rollouts, self._top_k)
        return await _plain(handle, prompt, rollouts)


async def _plain(handle: ReferenceHandle, prompt: Prompt, rollouts: RolloutsRef) -> TeacherRows:
    """Return the log-probs of the sampled tokens alone."""
    return [TeacherLogprobs(values) for values in await handle.logprobs(prompt, rollouts)]


def _asked_as(teacher: TeacherConfig, prompt: Prompt) -> str:
    """Return what two teachers with the same answer have in common."""
    is_policys = not teacher.has_workers and teacher.name not in prompt.teacher_ids
    return _AS_POLICY if is_policys else teacher.name


def _handle(workers: Workers, teacher: TeacherConfig) -> ReferenceHandle:
    handle = workers.teachers[teacher.name] if teacher.has_workers else workers.reference
    assert handle is not None, "a teacher that is the reference needs one"
    return handle


def _as_read_by(teacher: str, prompt: Prompt) -> Prompt:
    """Return ``prompt`` with the tokens that the teacher reads in its place."""
    token_ids = prompt.teacher_ids.get(teacher)
    return prompt if token_ids is None else replace(prompt, token_ids=token_ids, teacher_ids={})
