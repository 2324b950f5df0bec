"""Reference workers: log-probs of sampled completions under the frozen model the run began with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
import torch

from grpo_dist.batching import micro_batches
from grpo_dist.concurrency import gather
from grpo_dist.config import Model, Reference
from grpo_dist.hardware import device_type, resolve_dtype
from grpo_dist.policy_model import TokenLogprobs, load_causal_lm
from grpo_dist.types import Prompt, Rollout


class ReferenceWorker:
    """One frozen copy of the model."""

    def __init__(
        self, settings: Reference, *, model: Model, model_dir: str, temperature: float, chunk_tokens: int
    ) -> None:
        device = device_type()
        self._device = torch.device(device)
        self._budget = settings.micro_batch_tokens
        causal_lm = load_causal_lm(
            model_dir,
            dtype=resolve_dtype(model.dtype, device),
            attention=model.attention,
            trust_remote_code=model.trust_remote_code,
        )
        module = TokenLogprobs(causal_lm, temperature=temperature, chunk_tokens=chunk_tokens)
        self._module = module.to(self._device).eval().requires_grad_(False)

    def ready(self) -> None:
        """Returns once the model is loaded."""

    @torch.no_grad()
    def logprobs(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
        """float32 [C] for each rollout, nats, at the sampling temperature."""
        start = len(prompt.token_ids)
        rows = [np.concatenate([prompt.token_ids, r.completion_ids]) for r in rollouts]
        out: list[np.ndarray] = [np.empty(0, np.float32)] * len(rows)
        for chosen in micro_batches([len(row) for row in rows], self._budget):
            values = self._forward([rows[i] for i in chosen], start).cpu().numpy()
            for i, row in zip(chosen, values, strict=True):
                out[i] = row[start : len(rows[i])].copy()
        return out

    def _forward(self, rows: list[np.ndarray], start: int) -> torch.Tensor:
        tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
        mask = torch.zeros(tokens.shape, dtype=torch.bool)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = torch.from_numpy(row.astype(np.int64))
            mask[i, start : len(row)] = True
        return self._module(tokens.to(self._device), mask.to(self._device))[0]


class ReferencePool:
    """Driver-side handle: a group goes to the worker with the fewest outstanding groups."""

    def __init__(
        self,
        settings: Reference,
        *,
        model: Model,
        model_dir: str,
        temperature: float,
        chunk_tokens: int,
        options: dict[str, Any],
    ) -> None:
        actor = ray.remote(ReferenceWorker)
        self._workers = [
            actor.options(name=f"reference-{i}", **options).remote(
                settings, model=model, model_dir=model_dir, temperature=temperature, chunk_tokens=chunk_tokens
            )
            for i in range(settings.num_workers)
        ]
        self._outstanding = [0] * settings.num_workers

    async def ready(self) -> None:
        await gather(_result(worker.ready.remote()) for worker in self._workers)

    async def logprobs(self, prompt: Prompt, rollouts: Any) -> list[np.ndarray]:
        """``rollouts`` is an object reference to the samples, or the samples themselves."""
        index = min(range(len(self._workers)), key=self._outstanding.__getitem__)
        self._outstanding[index] += 1
        try:
            return await self._workers[index].logprobs.remote(prompt, rollouts)
        finally:
            self._outstanding[index] -= 1

    async def shutdown(self) -> None:
        for worker in self._workers:
            ray.kill(worker)


async def _result(ref: Any) -> Any:
    return await ref
