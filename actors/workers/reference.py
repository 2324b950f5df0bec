"""Reference workers: log-probs of sampled completions under a frozen model, the initial one or a teacher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from actors.lifecycle.calls import Probeable, one_at_a_time, results
from actors.lifecycle.team import ActorSpec, FrozenPool, Team
from actors.placement.own_gpus import check_gpus
from actors.transfer.connections import Seat
from actors.transfer.stream import receive
from actors.transfer.transport import Transport, open_transport
from actors.workers.exchange import as_arguments, from_arguments
from grpo_dist.config import ModelConfig, ReferenceConfig, TeacherConfig, TransferBackend
from grpo_dist.policy.attention import choose_kernel
from grpo_dist.policy.group_logprobs import group_logprobs
from grpo_dist.policy.lora import base_weights, find_start_adapter, merge_start
from grpo_dist.policy.micro_batches import MicroBatches
from grpo_dist.policy.model import TokenLogprobs, load_causal_lm, reads_packed_rows
from grpo_dist.policy.weight_buckets import ParameterSpec
from grpo_dist.runtime.hardware import device_type, logprob_chunk_mib, micro_batch_tokens, resolve_dtype
from grpo_dist.runtime.memory import HostCopies, release_cache
from grpo_dist.runtime.metering import Metered, metered
from grpo_dist.runtime.model_files import check_on_node
from grpo_dist.runtime.processes import freeze_loaded
from grpo_dist.types import PackedSamples, Prompt, TeacherLogprobs

# A frozen reference can be reloaded from the model directory. A refreshed one exists only in the actor and,
# in an earlier state, in a checkpoint.
_RENEWED = (
    "it was refreshed from the policy (`reference.refresh_every`) and can only be restored from a checkpoint"
)


class ReferenceWorker(Metered, Probeable):
    """One frozen copy of the model."""

    def __init__(
        self,
        *,
        model: ModelConfig,
        model_dir: str,
        temperature: float,
        token_budget: int | None = None,
        vocabulary: int | None = None,
    ) -> None:
        super().__init__()
        self._model, self._model_dir, self._vocabulary = model, model_dir, vocabulary
        self._temperature = temperature
        device = device_type()
        self._budget = micro_batch_tokens(token_budget, device)
        self._device = torch.device(device)
        self._module: Any = None
        self._micro: Any = None
        self._transport: Transport | None = None
        self._average: dict[str, torch.Tensor] = {}  # float32 moving average of half-precision weights
        self._memory = HostCopies(self._device, constant=True)

    def ready(self) -> None:
        """Load the model. Raises ValueError if this node lacks it, and UserError like `check_gpus`."""
        check_gpus()
        check_on_node(self._model_dir)
        dtype = resolve_dtype(self._model.dtype, device_type())  # may start CUDA
        causal_lm = load_causal_lm(
            self._model_dir,
            dtype=dtype,
            attention=self._model.attention,
            trust_remote_code=self._model.trust_remote_code,
            packing=self._model.packing,
            kernels=self._model.kernels,
        )
        if start := find_start_adapter(Path(self._model_dir)):
            merge_start(causal_lm, start)
        packs = reads_packed_rows(causal_lm)
        kernel = choose_kernel(self._model.attention, self._device, dtype) if packs else None
        self._micro = MicroBatches(self._budget, kernel, 1, self._device)
        module = TokenLogprobs(
            causal_lm,
            temperature=self._temperature,
            chunk_mib=logprob_chunk_mib(device_type()),
            vocabulary=self._vocabulary,
        )
        self._module = module.to(self._device).eval().requires_grad_(False)
        freeze_loaded()  # because `sleep` collects garbage

    def sleep(self) -> None:
        """Move the model to host memory."""
        self._memory.offload([*self._module.parameters(), *self._average.values()])
        release_cache()

    def wake_up(self) -> None:
        """Undo `sleep`."""
        self._memory.reload()

    def open_transfer(self, backend: TransferBackend, seats: Sequence[Seat], timeout_s: float) -> None:
        (seat,) = seats
        self._transport = open_transport(backend, seat, timeout_s=timeout_s)

    @torch.no_grad()
    def mix_in(self, specs: Sequence[ParameterSpec], bucket_bytes: int, mix: float) -> None:
        """Set the weights to (1 - mix) * weights + mix * received weights, computed in float32."""
        assert self._transport is not None, "open_transfer comes first"
        self._memory.forget()
        weights = dict(base_weights(self._module.model))
        for bucket in receive(self._transport, specs, bucket_bytes):
            for name, new in bucket:
                current = self._average.get(name, weights[name].float())
                mean = current.lerp(new.to(self._device, torch.float32), mix)
                weights[name].copy_(mean)
                if weights[name].dtype != torch.float32 and mix < 1.0:
                    self._average[name] = mean  # small steps of a moving average vanish in half precision

    def save(self, path: str) -> None:
        """Write the current weights to ``path`` as safetensors."""
        save_file({n: self._average.get(n, t) for n, t in base_weights(self._module.model)}, path)

    @torch.no_grad()
    def load(self, path: str) -> None:
        """Load the weights that `save` wrote."""
        self._memory.forget()
        self._average.clear()  # a rollback leaves those of later steps; a half-precision file has none
        saved = load_file(path, device=str(self._device))
        weights = dict(base_weights(self._module.model))
        for name, value in saved.items():
            if value.dtype != weights[name].dtype:
                self._average[name] = value
            weights[name].copy_(value)

    @metered("logprobs")
    def logprobs(
        self, prompt: Prompt, samples: Any, top_k: int, *stored: PackedSamples
    ) -> list[TeacherLogprobs]:
        """Return log-probs for each row of ``samples`` (`as_arguments`) at the sampling temperature, with the
        ``top_k`` likeliest tokens at each position.
        """
        groups = [(prompt, from_arguments(samples, stored))]
        (logprobs,) = group_logprobs(self._module, groups, self._micro, top_k=top_k)
        return logprobs


class ReferencePool(FrozenPool):
    """Driver-side handle of the reference, or of one teacher: sends each group to the worker with the fewest
    outstanding groups. ``vocabulary``: tokens of the policy, if a teacher may have more; None: equal.
    """

    def __init__(
        self,
        settings: ReferenceConfig | TeacherConfig,
        actors: ActorSpec,
        *,
        model: ModelConfig,
        model_dir: str,
        temperature: float,
        token_budget: int | None = None,
        vocabulary: int | None = None,
    ) -> None:
        makers = actors.makers(
            one_at_a_time(ReferenceWorker),
            settings.num_workers,
            model=model,
            model_dir=model_dir,
            temperature=temperature,
            token_budget=token_budget,
            vocabulary=vocabulary,
        )
        name = "reference"
        if isinstance(settings, TeacherConfig):
            name = f"teacher-{settings.name}"
        elif settings.refresh_every:
            actors = replace(actors, irreplaceable=_RENEWED)
        super().__init__(Team(name, makers, actors))

    async def logprobs(self, prompt: Prompt, rollouts: Any, top_k: int = 0) -> list[TeacherLogprobs]:
        """Return log-probs of the samples, with the ``top_k`` likeliest tokens at each position.
        ``rollouts``: the samples, or `StoredSamples`.
        """
        (samples,), stored = as_arguments([rollouts])
        async with self.turn():
            return await self.team.call("logprobs", prompt, samples, top_k, *stored)

    async def save(self, path: Path) -> None:
        async with self.turn():
            await self.workers[0].save.remote(str(path.absolute()))

    async def load(self, path: Path) -> None:
        async with self.turn():
            await results(worker.load.remote(str(path.absolute())) for worker in self.workers)
