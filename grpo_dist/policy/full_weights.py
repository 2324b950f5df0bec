"""Full tensors out of a sharded policy: for the rollout engines, and as a model in Hugging Face format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from grpo_dist.config import PolicyConfig
from grpo_dist.policy.checkpoint_format import CheckpointFormat, owners
from grpo_dist.policy.export import write_model
from grpo_dist.policy.lora import adapter_parameters, adapters, base_weights
from grpo_dist.policy.weight_buckets import ParameterSpec, make_buckets


class FullWeights:
    """The weights of ``model`` (transformers), which ``policy`` shards. Raises ValueError for a model whose
    checkpoint joins several parameters in one tensor.
    """

    def __init__(self, model: Any, policy: PolicyConfig) -> None:
        self._model = model
        self._zero3 = policy.zero_stage == 3
        self._lora_scale = policy.lora.scale if policy.lora else 0.0
        self._format = CheckpointFormat(model, self._parameters())

    def named_weights(self, adapters_only: bool = False) -> Sequence[tuple[str, Tensor]]:
        """Return (name as in the checkpoint, tensor), each once; or the low-rank adapters, which no
        checkpoint has.
        """
        return (adapter_parameters if adapters_only else base_weights)(self._model)

    def specs(self, *, adapters_only: bool = False, as_held: bool = False) -> list[ParameterSpec]:
        """Return what `buckets` yields, in order: every parameter once, tied ones under the checkpoint's
        name.
        """
        return [spec for specs in self._specs(adapters_only, as_held).values() for spec in specs]

    def buckets(
        self, bucket_bytes: int, *, adapters_only: bool = False, as_held: bool = False
    ) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield full tensors, bucket by bucket, each valid until the next is asked for. Collective under
        ZeRO-3.

        They are those of a checkpoint, with low-rank adapters merged into copies of them, or the adapters
        alone.

        Args:
            bucket_bytes: size of a bucket; a larger tensor gets a bucket of its own.
            as_held: yield the parameters as transformers' model has them, where its checkpoint names them
                otherwise or splits fused experts.
        """
        parameters = dict(self.named_weights(adapters_only))
        low_rank = {} if adapters_only else adapters(self.named_weights(adapters_only=True))
        specs, plain = self._specs(adapters_only, as_held), adapters_only or as_held
        owner, left = owners(specs), dict.fromkeys(specs)
        pending: dict[str, Tensor] = {}  # of parameters that are gathered, not yet sent
        for bucket in make_buckets([spec for own in specs.values() for spec in own], bucket_bytes):
            names = [name for name in dict.fromkeys(owner[spec.name] for spec in bucket) if name in left]
            own = {name: low_rank[name] for name in names if name in low_rank}
            held = [parameters[name] for name in names]
            with self.gathered([*held, *(t for adapter in own.values() for t in (adapter.a, adapter.b))]):
                for name, p in zip(names, held, strict=True):
                    del left[name]
                    value = own[name].merged_into(p.data, self._lora_scale) if name in own else p.data
                    pending |= {name: value} if plain else self._format.tensors(name, value)
                yield [(spec.name, pending.pop(spec.name)) for spec in bucket]
                if held and self._zero3:  # its parameter is released here
                    pending = {name: t.clone() for name, t in pending.items()}

    def gathered(self, parameters: list[Tensor]) -> Any:
        """Return a context in which this rank has the whole of ``parameters``. Collective under ZeRO-3."""
        if not self._zero3:
            return nullcontext()
        import deepspeed  # optional: only ranks need it

        return deepspeed.zero.GatheredParameters(parameters)

    def export(
        self, directory: Path, *, tokenizer_dir: str, trust_remote_code: bool, bucket_bytes: int = 1 << 28
    ) -> None:
        """Write the model in Hugging Face format (safetensors) with its tokenizer, from rank 0. Collective.

        Trained low-rank adapters are merged into it, and also written to `adapter` as peft reads them.
        """
        whole = self._on_first_rank(self.buckets(bucket_bytes, as_held=True))
        low_rank = self._on_first_rank(self.buckets(bucket_bytes, adapters_only=True))
        if dist.get_rank() == 0:
            write_model(self._model, whole, low_rank, directory, tokenizer_dir, trust_remote_code)
        dist.barrier()  # bounded: the process group has a deadline

    def _on_first_rank(self, buckets: Iterator[list[tuple[str, Tensor]]]) -> dict[str, Tensor]:
        """Copy ``buckets`` to this host's memory; return nothing on other ranks, which only gather."""
        keeps = dist.get_rank() == 0
        return {name: t.detach().cpu().clone() for bucket in buckets for name, t in bucket if keeps}

    def _specs(self, adapters_only: bool, as_held: bool) -> dict[str, list[ParameterSpec]]:
        """Return what `buckets` yields for each parameter."""
        if not (adapters_only or as_held):
            return self._format.specs
        return {name: [spec] for name, spec in self._parameters(adapters_only).items()}

    def _parameters(self, adapters_only: bool = False) -> dict[str, ParameterSpec]:
        return {
            name: ParameterSpec.of(name, p, getattr(p, "ds_shape", None))
            for name, p in self.named_weights(adapters_only)
        }
