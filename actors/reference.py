"""Reference workers: log-probs of sampled completions under the frozen model the run began with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
import torch

from actors.calls import LeastBusy, results
from grpo_dist.batching import micro_batches, pad_rows
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
            tokens, mask = pad_rows([rows[i] for i in chosen], [start] * len(chosen))
            values = self._module(tokens.to(self._device), mask.to(self._device))[0].cpu().numpy()
            for i, row in zip(chosen, values, strict=True):
                out[i] = row[start : len(rows[i])].copy()
        return out


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
        self._least_busy = LeastBusy(self._workers)

    async def ready(self) -> None:
        await results(worker.ready.remote() for worker in self._workers)

    async def logprobs(self, prompt: Prompt, rollouts: Any) -> list[np.ndarray]:
        """``rollouts`` is an object reference to the samples, or the samples themselves."""
        return await self._least_busy.call("logprobs", prompt, rollouts)

    async def shutdown(self) -> None:
        for worker in self._workers:
            ray.kill(worker)
