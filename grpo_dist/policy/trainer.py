"""One ZeRO rank of the policy: the model under DeepSpeed, optimiser updates, weights out, checkpoints.

No Ray here: `actors.workers.policy` puts one of these into each actor, and a script may use it on its own.
All ranks call the same methods in the same order; each method that communicates says so.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from grpo_dist.algorithms.schedules import learning_rate
from grpo_dist.batch.sharding import micro_batches, packed_micro_batches
from grpo_dist.config import ModelConfig, PolicyConfig
from grpo_dist.health.bounds import GRAD_NORM, Bound, passed
from grpo_dist.health.watch import BAD_WEIGHTS, REFUSED, SKIPPED
from grpo_dist.policy.attention import choose_kernel
from grpo_dist.policy.checkpoint_format import CheckpointFormat, owners
from grpo_dist.policy.deepspeed_config import deepspeed_config
from grpo_dist.policy.deepspeed_engine import initialize, own_files, zero3_loading
from grpo_dist.policy.export import write_model
from grpo_dist.policy.lora import (
    adapter_parameters,
    adapters,
    add_adapters,
    base_parameters,
    empty_model,
)
from grpo_dist.policy.loss import LossSettings, add_stats, batch_loss, finish_stats
from grpo_dist.policy.model import TokenLogprobs, attention_cost, compile_layers, load_causal_lm
from grpo_dist.policy.norm_gate import NormGate
from grpo_dist.policy.offload import check_offload, create_moments, optimizer_device, set_steps, size_buffers
from grpo_dist.policy.packing import Layout, packed, padded
from grpo_dist.policy.ranks import Rank, join, least_of_top, over_ranks
from grpo_dist.policy.resharding import SavedPolicy, Sharding, deal_out
from grpo_dist.policy.sequence_parallel import SequenceGroup, check_heads
from grpo_dist.policy.weight_buckets import ParameterSpec, make_buckets
from grpo_dist.runtime.hardware import (
    device_type,
    logprob_chunk_mib,
    micro_batch_tokens,
    resolve_dtype,
)
from grpo_dist.types import TrainBatch

_TAG = "state"  # of DeepSpeed's checkpoint: one per directory, the directory's name says which step


class Trainer:
    """A rank. Collective: making one joins all ranks."""

    def __init__(
        self,
        place: Rank,
        policy: PolicyConfig,
        *,
        model: ModelConfig,
        model_dir: str,
        loss: LossSettings,
        temperature: float,
        token_budget: int | None,
        epochs: int,
        total_updates: int,
        seed: int,
    ) -> None:
        self.place, self._policy, self._loss, self._epochs = place, policy, loss, epochs
        self._total_updates, self._updates = total_updates, 0
        # By row id, float32 [C]: log-probs of what the last `update` trained, when it first came to the row.
        self.token_logprobs: dict[int, np.ndarray] = {}
        self._trust_remote_code = model.trust_remote_code
        device = device_type()
        self.device = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        dtype = resolve_dtype(model.dtype, device)
        self.dtype_name = str(dtype).removeprefix("torch.")
        check_offload(policy)
        self._token_budget = micro_batch_tokens(token_budget, device)
        self._kernel = choose_kernel(model.attention, self.device, dtype) if model.packing else None
        settings = deepspeed_config(policy, dtype=dtype)
        if policy.offload.parameters == "nvme":
            empty = empty_model(model_dir, trust_remote_code=model.trust_remote_code)
            size_buffers(settings, max(-(-p.numel() // place.world_size) for p in empty.parameters()))
        torch.manual_seed(seed)
        join(place)
        self._zero3 = zero3_loading(settings) if policy.zero_stage == 3 else None
        causal_lm = load_causal_lm(
            model_dir,
            dtype=dtype,
            attention=model.attention,
            trust_remote_code=model.trust_remote_code,
            gradient_checkpointing=model.gradient_checkpointing,
            packing=model.packing,
        )
        if policy.lora is not None:
            add_adapters(causal_lm, policy.lora, seed=seed)
        if policy.compile:
            compile_layers(causal_lm)
        check_heads(causal_lm, policy.sequence_parallel)
        self._shared = SequenceGroup.join(policy.sequence_parallel) if policy.sequence_parallel > 1 else None
        chunk_mib = logprob_chunk_mib(policy.logprob_chunk_mib, device)
        module = TokenLogprobs(causal_lm, temperature=temperature, chunk_mib=chunk_mib, ranks=self._shared)
        self.attention_cost = attention_cost(causal_lm)
        self.engine = initialize(module, policy, settings)
        self._gate = NormGate(self.engine.optimizer) if policy.zero_stage > 0 else None
        self._files = own_files(self.engine)
        self._checkpoint_format = CheckpointFormat(causal_lm, self._held())

    def update(self, batches: Sequence[TrainBatch], bounds: Sequence[Bound] = ()) -> dict[str, float]:
        """One optimiser update per batch and epoch, this rank's rows of each. Collective.

        The second and later updates are off-policy with respect to the first, so their ``old_logprobs`` are
        those of the weights the step began with, or the engine's if the settings say so. Returns metrics of
        the whole step over all ranks: the mean over updates (maxima where the name says so), except
        ``mismatch/*``, which compares rollout and trainer before anything moved; ``first_update/*`` are those
        before anything moved, too. An update whose loss or gradient is not finite, or whose own metrics pass
        one of ``bounds``, is not made, and counted in `health/skipped_updates`, of the latter also in
        `health/refused_<key of the bound>`; `health/bad_weights` is 1 when weights are not finite afterwards.
        """
        prepared = [self._prepared(b, moves=i > 0 or self._epochs > 1) for i, b in enumerate(batches)]
        plan = prepared * self._epochs
        self.token_logprobs = {}
        if self._loss.old_logprobs == "trainer":
            plan[0] = replace(plan[0], old_logprobs=None)  # nothing has moved yet: the ratio is exactly 1
        per_update, refused = [], Counter[str]()
        for batch in plan:
            own, by = self._one_update(batch, bounds)
            per_update.append(own)
            refused.update(f"{REFUSED}{bound.key}" for bound in by)
        first = per_update[0]
        metrics = {k: sum(m[k] for m in per_update) / len(per_update) for k in first}
        metrics |= {k: max(m[k] for m in per_update) for k in first if k.endswith("_max")}
        metrics[SKIPPED] = sum(m[SKIPPED] for m in per_update)
        metrics[BAD_WEIGHTS] = float(not self._weights_are_finite())
        # Before anything moved: of all samples where the trainer's old log-probs are known.
        unmoved = per_update[: len(batches) if self._loss.old_logprobs == "trainer" else 1]
        for name in (k for k in first if k.startswith("mismatch/")):
            values = [m[name] for m in unmoved]
            metrics[name] = max(values) if name.endswith("_max") else sum(values) / len(values)
        shown = ("policy/ratio_mean", "policy/ratio_max", "ref/kl")
        metrics |= {name: float(count) for name, count in refused.items()}
        return metrics | {f"first_update/{k}": first[k] for k in shown if k in first}

    @torch.no_grad()
    def logprobs(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies, float32 [B, T], of ``batch`` under the current weights; 0 outside the loss
        mask. Collective.
        """
        logprobs, entropies = (torch.zeros_like(batch.rollout_logprobs) for _ in range(2))
        for rows in self._plan(batch):
            part = self._part(batch, rows)
            values, entropy = self.engine(self._layout(part), with_entropy=True)
            if rows:
                logprobs[rows, : values.shape[1]] = values.cpu()
                entropies[rows, : values.shape[1]] = entropy.cpu()
        return logprobs, entropies

    def row_logprobs(self, batches: Sequence[TrainBatch]) -> dict[int, np.ndarray]:
        """By row id, float32 [C]: log-probs of the rows of ``batches`` under the current weights.
        Collective.
        """
        found: dict[int, np.ndarray] = {}
        for batch in batches:
            values, mask = self.logprobs(batch)[0].numpy(), batch.loss_mask.numpy()
            ids = [] if batch.row_ids is None else batch.row_ids.tolist()
            found |= {row: own[wanted] for row, own, wanted in zip(ids, values, mask, strict=True)}
        return found

    def _prepared(self, batch: TrainBatch, *, moves: bool) -> TrainBatch:
        """``batch`` with what must be known of the weights before they move. ``moves``: they will have moved
        by the time it is trained on. Collective.
        """
        bypassed = self._loss.old_logprobs == "rollout"
        share = self._loss.top_entropy_share
        batch = replace(batch, old_logprobs=batch.rollout_logprobs) if bypassed else batch
        if share == 1.0 and (bypassed or not moves):
            return batch
        logprobs, entropies = self.logprobs(batch)
        if share < 1.0:
            own = batch.loss_mask if self._speaks else torch.zeros_like(batch.loss_mask)
            least = least_of_top(entropies[own], share, self.device)
            batch = replace(batch, policy_mask=batch.loss_mask & (entropies >= least))
        return batch if bypassed else replace(batch, old_logprobs=logprobs)

    def accumulate(self, batch: TrainBatch) -> dict[str, float]:
        """Gradients of this rank's rows of ``batch``, reduced over ranks; metrics of the whole batch.
        Collective.
        """
        plan = self._plan(batch)
        stats: dict[str, Tensor] = {}
        for i, rows in enumerate(plan):
            part = self._part(batch, rows)
            self.engine.set_gradient_accumulation_boundary(i == len(plan) - 1)
            logprobs, entropy = self.engine(self._layout(part), with_entropy=True)
            self._note(part, logprobs)
            loss, part_stats = batch_loss(logprobs, part, self._loss, entropy=entropy)
            # DeepSpeed averages gradients over ranks; the loss is already a share of the whole batch's, so
            # undo that. A loss that is not finite gets a gradient that is not either: the one test of the
            # reduced gradient then tells all ranks.
            known = torch.where(loss.detach().isfinite(), 1.0, torch.nan)
            self.engine.backward(loss * self.place.world_size * known)
            if not self._speaks:
                part_stats = {name: torch.zeros_like(value) for name, value in part_stats.items()}
            stats = add_stats(stats, part_stats) if stats else part_stats
        return finish_stats(over_ranks(stats))

    @torch.no_grad()
    def _note(self, part: TrainBatch, logprobs: Tensor) -> None:
        if part.row_ids is None:
            return
        values, mask = logprobs.float().cpu().numpy(), part.loss_mask.cpu().numpy()
        for row, own, trained in zip(part.row_ids.tolist(), values, mask, strict=True):
            self.token_logprobs.setdefault(row, own[trained])

    def gradients(self) -> dict[str, Tensor]:
        """Full float32 gradients by name of the trained parameters, between `accumulate` and `step`.
        Collective.
        """
        from deepspeed.utils import safe_get_full_grad

        trained = self._named_parameters(adapters_only=self._policy.lora is not None)
        return {name: safe_get_full_grad(p).detach().float().cpu().clone() for name, p in trained}

    def step(self, *, limit: float = math.inf) -> dict[str, float]:
        """Clip, move the weights, clear the gradients. Where the gradient is not finite, or its norm above
        ``limit``, weights, optimiser and schedule stay as they are, on all ranks. Collective.
        """
        o = self._policy.optimizer
        rate = learning_rate(
            self._updates,
            lr=o.lr,
            schedule=o.schedule,
            warmup=o.warmup_steps,
            total=self._total_updates,
            min_ratio=o.min_lr_ratio,
        )
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        gate = self._gate
        norm, made = self._gated_step(gate, limit) if gate else self._step_without_zero(limit)
        self._updates += made
        known = norm if math.isfinite(norm) else math.nan
        return {GRAD_NORM: known, "policy/lr": rate, SKIPPED: float(not made)}

    def _gated_step(self, gate: NormGate, limit: float) -> tuple[float, bool]:
        """Norm of the gradient, and whether the weights were moved."""
        gate.limit = limit
        self.engine.step()
        return gate.norm, self.engine.was_step_applied()

    def _step_without_zero(self, limit: float) -> tuple[float, bool]:
        # Every rank holds the whole gradient, DeepSpeed reports no norm of it, and would move the weights
        # whatever it is.
        grads = [p.grad for p in self.engine.module.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(grads))
        made = norm <= limit and math.isfinite(norm)
        if made:
            self.engine.step()
        else:
            self.engine.zero_grad()
        return norm, made

    def _one_update(self, batch: TrainBatch, bounds: Sequence[Bound]) -> tuple[dict[str, float], list[Bound]]:
        """Metrics, and the bounds for which it was not made."""
        metrics = self.accumulate(batch)
        refused = passed(bounds, metrics)
        most = min((b.value for b in bounds if b.metric == GRAD_NORM), default=math.inf)
        metrics |= self.step(limit=-math.inf if refused else most)
        return metrics, refused or passed(bounds, metrics)

    @torch.no_grad()
    def _weights_are_finite(self) -> bool:
        """Of all ranks, as far as they are in memory. Collective."""
        trained = [p for p in self.engine.module.parameters() if p.requires_grad]
        held = [getattr(p, "ds_tensor", p).detach() for p in trained]  # under ZeRO-3 this rank's part
        largest = torch.nn.utils.get_total_norm([t for t in held if t.numel()], torch.inf).to(self.device)
        bad = largest.isfinite().logical_not().int()
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)  # bounded: the process group has a deadline
        return not bad

    def _plan(self, batch: TrainBatch) -> list[list[int]]:
        """Rows of each micro-batch, as many on every rank: under ZeRO-2 and 3 each one is a collective."""
        if self._kernel is None:
            plan = micro_batches(batch.lengths.tolist(), self._token_budget)
        else:
            rows = batch.rows
            lengths, groups = rows.lengths.tolist(), rows.group_ids.tolist()
            prompts = rows.prompt_lengths.tolist()
            plan = packed_micro_batches(lengths, groups, prompts, self._token_budget)
        count = torch.tensor(len(plan), device=self.device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX)  # bounded: the process group has a deadline
        return plan + [[] for _ in range(int(count) - len(plan))]

    def _part(self, batch: TrainBatch, rows: list[int]) -> TrainBatch:
        """These rows on the device. No rows: one masked token, which goes through the model and counts for
        nothing.
        """
        part = batch.select(rows) if rows else _blank(batch)
        names = [f.name for f in fields(part) if isinstance(getattr(part, f.name), Tensor)]
        return replace(part, **{name: getattr(part, name).to(self.device) for name in names})

    def _layout(self, part: TrainBatch) -> Layout:
        kernel = self._kernel
        if kernel is None:
            return padded(part.tokens, part.loss_mask)
        return packed(part.rows, kernel, multiple=self._policy.sequence_parallel)

    @property
    def _speaks(self) -> bool:
        """Whether this rank's statistics count: ranks that share their rows all have the same."""
        return self._shared is None or self._shared.index == 0

    def parameter_specs(self, *, adapters_only: bool = False, as_held: bool = False) -> list[ParameterSpec]:
        """What `iter_weights` yields, in order: every parameter once, tied ones under the checkpoint's
        name.
        """
        return [spec for specs in self._specs(adapters_only, as_held).values() for spec in specs]

    def iter_weights(
        self, bucket_bytes: int, *, adapters_only: bool = False, as_held: bool = False
    ) -> Iterator[list[tuple[str, Tensor]]]:
        """Full tensors, bucket by bucket, valid until the next is asked for: those of a checkpoint, with
        low-rank adapters merged into copies of them, or the adapters alone. Collective under ZeRO-3.

        ``as_held``: the parameters as transformers' model has them, where its checkpoint names them
        otherwise or holds experts apart.
        """
        parameters = dict(self._named_parameters(adapters_only))
        low_rank = {} if adapters_only else adapters(self._named_parameters(adapters_only=True))
        specs, plain = self._specs(adapters_only, as_held), adapters_only or as_held
        owner, left = owners(specs), dict.fromkeys(specs)
        pending: dict[str, Tensor] = {}  # of parameters that are gathered, not yet sent
        for bucket in make_buckets([spec for own in specs.values() for spec in own], bucket_bytes):
            names = [name for name in dict.fromkeys(owner[spec.name] for spec in bucket) if name in left]
            own = {name: low_rank[name] for name in names if name in low_rank}
            held = [parameters[name] for name in names]
            with self._gathered([*held, *(t for adapter in own.values() for t in (adapter.a, adapter.b))]):
                for name, p in zip(names, held, strict=True):
                    del left[name]
                    value = own[name].merged_into(p.data, self._lora_scale) if name in own else p.data
                    pending |= {name: value} if plain else self._checkpoint_format.tensors(name, value)
                yield [(spec.name, pending.pop(spec.name)) for spec in bucket]
                if held and self._policy.zero_stage == 3:  # its parameter is released here
                    pending = {name: t.clone() for name, t in pending.items()}

    def _specs(self, adapters_only: bool, as_held: bool) -> dict[str, list[ParameterSpec]]:
        """Of each parameter, what `iter_weights` yields for it."""
        if not (adapters_only or as_held):
            return self._checkpoint_format.specs
        return {name: [spec] for name, spec in self._held(adapters_only).items()}

    def _held(self, adapters_only: bool = False) -> dict[str, ParameterSpec]:
        return {
            name: ParameterSpec.of(name, p, getattr(p, "ds_shape", None))
            for name, p in self._named_parameters(adapters_only)
        }

    @property
    def _lora_scale(self) -> float:
        return self._policy.lora.scale if self._policy.lora else 0.0

    def offload_states(self) -> None:
        """Parameters, gradients and optimiser states go to host memory; ZeRO only, and nothing but
        `reload_states` may follow.
        """
        self.engine.offload_states(pin_memory=self.device.type == "cuda")

    def reload_states(self) -> None:
        """What `offload_states` moved is where it was, bit by bit."""
        self.engine.reload_states()

    def save(self, directory: Path, *, beside: bool = False) -> None:
        """DeepSpeed's sharded state of what is trained, its optimiser and counters. Collective. ``beside``:
        return once it is copied in host memory; `is_saved` tells when the files are there.
        """
        self._files.beside = beside
        state = {"updates": self._updates, "rng": torch.get_rng_state()}
        frozen = self._policy.lora is not None  # all but the adapters, and that is in the model's directory
        self.engine.save_checkpoint(
            str(directory), tag=_TAG, client_state=state, exclude_frozen_parameters=frozen
        )

    def is_saved(self) -> bool:
        """Of what was saved beside training. May be called by another thread; raises what went wrong."""
        return self._files.written()

    def load(self, directory: Path) -> None:
        """What `save` wrote, also by other ranks or under another ZeRO stage. Collective. Raises ValueError
        where there is nothing that can be read.
        """
        if not (directory / _TAG).is_dir():
            raise ValueError(f"{directory}: no policy state; use another checkpoint")
        own = Sharding.of(self.place.world_size, self.engine.config)
        saved = SavedPolicy(directory / _TAG, self._files.mapped)
        if saved.sharding == own:
            state = self._load_own(directory)
        else:
            deal_out(saved, self.engine, own)
            state = saved.client_state
        self._updates = state["updates"]
        torch.set_rng_state(state["rng"])

    def _load_own(self, directory: Path) -> Mapping[str, Any]:
        """By as many ranks at the same ZeRO stage: DeepSpeed's own way, bit by bit."""
        on_disk = optimizer_device(self._policy) == "nvme"
        if on_disk:
            create_moments(self.engine.optimizer)
        whole = self._policy.lora is None
        path, state = self.engine.load_checkpoint(str(directory), tag=_TAG, load_module_strict=whole)
        if path is None:
            raise ValueError(f"{directory}: DeepSpeed finds no policy state there; use another checkpoint")
        if on_disk:
            set_steps(self.engine.optimizer, state["updates"])
        return state

    def export(self, directory: Path, *, tokenizer_dir: str, bucket_bytes: int = 1 << 28) -> None:
        """The model in Hugging Face format (safetensors) with its tokenizer, written by rank 0; trained
        low-rank adapters are merged into it, and beside it in `adapter` as peft reads them. Collective.
        """
        whole = self._on_first_rank(self.iter_weights(bucket_bytes, as_held=True))
        low_rank = self._on_first_rank(self.iter_weights(bucket_bytes, adapters_only=True))
        if self.place.rank == 0:
            write_model(
                self.engine.module.model, whole, low_rank, directory, tokenizer_dir, self._trust_remote_code
            )
        dist.barrier()  # bounded: the process group has a deadline

    def _on_first_rank(self, buckets: Iterator[list[tuple[str, Tensor]]]) -> dict[str, Tensor]:
        """Everything in ``buckets`` in this host's memory; nothing on other ranks, which only gather."""
        keeps = self.place.rank == 0
        return {name: t.detach().cpu().clone() for bucket in buckets for name, t in bucket if keeps}

    def close(self) -> None:
        dist.destroy_process_group()

    def _named_parameters(self, adapters_only: bool = False) -> list[tuple[str, torch.nn.Parameter]]:
        """(name as in the checkpoint, parameter), each parameter once; or the low-rank adapters, which no
        checkpoint has.
        """
        return (adapter_parameters if adapters_only else base_parameters)(self.engine.module.model)

    def _gathered(self, parameters: list[Tensor]) -> Any:
        if self._policy.zero_stage < 3:
            return nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters(parameters)


def _blank(batch: TrainBatch) -> TrainBatch:
    """A row of two masked tokens that stands for no sample."""
    values = {f.name: getattr(batch, f.name) for f in fields(batch)}
    rows: dict[str, Any] = {
        name: torch.zeros(1, 2, dtype=value.dtype)
        for name, value in values.items()
        if isinstance(value, Tensor) and value.ndim == 2
    }
    return replace(
        batch, **rows, lengths=torch.tensor([2]), group_ids=None, prompt_lengths=None, row_ids=None
    )
