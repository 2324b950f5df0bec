"""The part of `PolicyGroup` that computes values of rows without training on them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np

from grpo_dist.types import TrainBatch


class RowValues:
    """A base of `PolicyGroup`, which describes what it uses."""

    update_s: float

    def stage(self, batches: Sequence[TrainBatch]) -> list[Any]:
        raise NotImplementedError

    def _deadline(self, seconds: float, stage: str) -> AbstractAsyncContextManager[None]:
        raise NotImplementedError

    async def _each(
        self, method: str, arguments: Sequence[tuple[Any, ...]], group: str | None = None
    ) -> list[Any]:
        raise NotImplementedError

    async def logprobs(self, batch: TrainBatch) -> tuple[str, dict[int, np.ndarray]]:
        """Return log-probs of the rows of ``batch``: see `PolicyWorker.logprobs`."""
        answers = await self._of_rows("logprobs", batch, "log-probs")
        rows = {row: values for _, own in answers for row, values in own.items()}
        return answers[0][0], rows

    async def score_norms(self, batch: TrainBatch) -> dict[int, np.ndarray]:
        """Return by row id the score norms of the trained tokens of ``batch`` under the current weights,
        float32 [C]: see `selected_score_norms`.
        """
        answers = await self._of_rows("score_norms", batch, "score norms of tokens")
        return {row: values for own in answers for row, values in own.items()}

    async def _of_rows(self, method: str, batch: TrainBatch, stage: str) -> list[Any]:
        arguments = [(own,) for own in self.stage([batch])]
        async with self._deadline(self.update_s, stage):
            return await self._each(method, arguments)
