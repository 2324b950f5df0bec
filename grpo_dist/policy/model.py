"""A causal language model that computes the log-probs of given tokens. Policy and reference share it; the
policy's ranks add adapters, router replay and compiled layers.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from psutil import virtual_memory
from torch import Tensor, nn

from grpo_dist.config import ModelConfig, PolicyConfig
from grpo_dist.policy.attention import NAME, attention_layers, packing_problem, register
from grpo_dist.policy.checkpoint_format import keep_used_conversions
from grpo_dist.policy.layer_kernels import use_kernels
from grpo_dist.policy.logprobs import selected_logprobs, selected_score_norms, top_logprobs
from grpo_dist.policy.lora import add_adapters, find_start_adapter, start_from
from grpo_dist.policy.packing import Layout
from grpo_dist.policy.router_replay import replay_routes
from grpo_dist.policy.sequence_parallel import SequenceGroup, check_heads
from grpo_dist.runtime.hardware import device_type, quiet_libraries
from grpo_dist.runtime.logit_transform import LogitTransform
from grpo_dist.runtime.model_config import heads_of_layers, keep_attention_cap
from grpo_dist.runtime.model_files import weight_files

logger = logging.getLogger("grpo_dist")
HeadOutputs = tuple[Tensor, Tensor | None, Tensor | None]  # see `TokenLogprobs.forward`
# Model types whose noise is in code, not in a setting.
_SAMPLES = {"phimoe": "its router (PhiMoE's sparse mixer) draws experts at random"}


def load_causal_lm(
    model_dir: str,
    *,
    dtype: torch.dtype,
    attention: str,
    trust_remote_code: bool,
    gradient_checkpointing: bool = False,
    packing: bool = False,
    kernels: str = "torch",
) -> Any:
    """Load the transformers model in ``model_dir``; with ``packing`` it reads packed rows, unless its
    architecture cannot: see `reads_packed_rows`. Raises ValueError for a checkpoint that lacks weights or
    does not fit in memory, and as `check_supported` and `use_kernels`.
    """
    quiet_libraries()
    from transformers import AutoModelForCausalLM

    implementation = None if attention == "auto" else attention
    with _enough_memory(Path(model_dir)):
        model, loading = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=dtype, attn_implementation=implementation, trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )  # fmt: skip
    if missing := sorted(loading["missing_keys"]):  # transformers has filled them at random
        raise ValueError(
            f"model {model_dir}: its files have no weights for {missing[0]} ({len(missing)} such); its "
            "config.json is another model's, or files are missing: use a whole checkpoint"
        )
    keep_used_conversions(model)
    keep_attention_cap(model)
    check_supported(model, model_dir)
    use_kernels(model, kernels, device_type())
    if packing and (problem := packing_problem(model)):
        logger.warning("model %s: its rows are padded instead of packed: %s", model_dir, problem)
    elif packing:
        register()
        model.set_attn_implementation(NAME)
    model.config.use_cache = False
    switch_off_noise(model)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


@contextmanager
def _enough_memory(model_dir: Path) -> Iterator[None]:
    """Raise ValueError with memory and largest file size if the block cannot map or allocate weights."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and not re.search(
            r"unable to mmap|can't allocate memory", str(error)
        ):
            raise
        gib = 2.0**30
        largest = max((file.stat().st_size for file in weight_files(model_dir)), default=0) / gib
        raise ValueError(
            f"model {model_dir}: this machine's memory, {virtual_memory().total / gib:.0f} GiB, does not "
            f"hold its weights, whose largest file has {largest:.0f} GiB; use more memory, more nodes with "
            "policy.zero_stage=3, or a smaller model. A file larger than the memory cannot be mapped: split "
            'it once, save_pretrained(..., max_shard_size="5GB")'
        ) from error


def reads_packed_rows(model: Any) -> bool:
    """Return whether `load_causal_lm` has prepared ``model`` for packed rows."""
    return bool(model.config._attn_implementation == NAME)


def vocabulary_size(model_dir: str | Path, *, trust_remote_code: bool) -> int:
    """Return the vocabulary size of the LM head of the model in ``model_dir``."""
    from transformers import AutoConfig  # heavy

    config = AutoConfig.from_pretrained(model_dir, trust_remote_code=trust_remote_code)
    return int(config.get_text_config().vocab_size)


def check_supported(model: Any, model_dir: str) -> None:
    """Raise ValueError for a ``model`` (transformers, with or without weights) whose log-probs
    `TokenLogprobs` would not compute.
    """
    if why := _SAMPLES.get(model.config.get_text_config().model_type):
        raise ValueError(
            f"model {model_dir}: {why} while it trains, and no setting turns that off, so the trainer's "
            "log-probs would not be the engine's; use another mixture of experts (Qwen, Mixtral, OLMoE)"
        )
    try:
        LogitTransform.from_model(model)
    except ValueError as error:
        raise ValueError(
            f"model {model_dir}: {error}, which the trainer's log-probs do not follow; use another model "
            "(Qwen, Llama, Mistral, OLMo, Gemma and their like)"
        ) from error


def switch_off_noise(model: nn.Module) -> None:
    """Turn off dropout, skipped layers and noise on a router's input, whatever the model's configuration has:
    the engine has none, so its log-probs would differ from the trainer's.

    Modules that read their configuration at run time get a copy without noise; ``model`` keeps the original,
    which an export writes.
    """
    quiet: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name in _list_noise(module):
            setattr(module, name, 0.0)
        config = getattr(module, "config", None)
        if module is model or not hasattr(config, "__dict__") or not _list_noise(config):
            continue
        if id(config) not in quiet:
            quiet[id(config)] = deepcopy(config)
            for name in _list_noise(config):
                setattr(quiet[id(config)], name, 0.0)
        module.config = quiet[id(config)]


def _list_noise(holder: Any) -> list[str]:
    """Return the attributes that are a rate of dropout or noise above 0: `resid_pdrop`, `jitter_noise`."""
    return [
        name
        for name, value in vars(holder).items()
        if isinstance(value, float) and value and any(word in name for word in ("drop", "jitter"))
    ]


def compile_layers(model: Any) -> None:
    """Compile each layer of ``model``'s decoder with torch.compile, for any number of tokens. Attention over
    packed rows is not compiled: it splits the graph in two.
    """
    for layer in model.get_decoder().layers:
        layer.compile(dynamic=True)


def attention_cost(model: Any) -> float:
    """Return the extra cost of a token for each token before it, as a share of its own cost.

    A token takes 2 FLOPs per active parameter, and in each layer 2 H D for the score of a token before it and
    2 H D for its value, of which causal attention does half on average.
    """
    config = model.config.get_text_config()
    heads = heads_of_layers(config)
    pairs = attention_layers(config) * sum(h.queries * h.size for h in heads) / len(heads)
    per_token = getattr(config, "num_experts_per_tok", None)
    parameters = 0.0
    for name, p in model.named_parameters():
        shape = getattr(p, "ds_shape", p.shape)
        share = min(1.0, per_token / shape[0]) if per_token and ".experts." in name else 1.0
        parameters += share * shape.numel()
    return pairs / parameters


class TokenLogprobs(nn.Module):
    """Wraps a transformers causal LM; ``forward`` returns per-token log-probs instead of logits.

    ``temperature``: default for layouts without one. ``chunk_mib``: size of a block of float32 logits, MiB;
    at most two exist at once. ``ranks``: the ranks that share the tokens of a layout; `forward` is then
    collective over them. ``vocabulary``: as in `top_logprobs`.
    """

    def __init__(
        self,
        model: Any,
        *,
        temperature: float,
        chunk_mib: int,
        ranks: SequenceGroup | None = None,
        vocabulary: int | None = None,
    ) -> None:
        super().__init__()
        self._ranks = ranks
        # `model` is registered first, so that `named_parameters` names shared weights as the checkpoint does.
        self.model = model
        transform = LogitTransform.from_model(model)
        self.head = _LMHead(model.get_output_embeddings(), transform, temperature, chunk_mib, vocabulary)

    def forward(
        self, layout: Layout, with_entropy: bool = False, score_norms: bool = False, top_k: int = 0
    ) -> HeadOutputs:
        """Return log-probs in nats, float32 [B, T], at the sampling temperature, of the tokens that
        ``layout`` wants, 0 for others; with ``with_entropy`` their entropies [B, T]; and the log-probs of the
        layout's ``candidates`` [M, K], in their order.

        ``score_norms``: return only `selected_score_norms`, instead of the log-probs. ``top_k``: return only
        `top_logprobs`: log-probs [B, T], and likeliest tokens and their log-probs [M, K].
        """
        part, rank_indices = (layout, None) if self._ranks is None else self._ranks.own_slice(layout)

        def whole(values: Tensor | None) -> Tensor | None:
            if values is not None and self._ranks is not None and rank_indices is not None:
                values = self._ranks.together(values, rank_indices, len(layout.targets))
            return layout.unpack_rows(values) if values is not None and values.ndim == 1 else values

        values, *further = self._selected(part, with_entropy, score_norms, top_k)
        first, second, third = whole(values), *map(whole, further)
        assert first is not None, "log-probs are always computed"
        return first, second, third

    def _selected(self, layout: Layout, with_entropy: bool, score_norms: bool, top_k: int) -> HeadOutputs:
        """Do as `forward`, for the wanted tokens only: [M] and [M, K]."""
        inputs = {} if layout.spans is None else {"position_ids": layout.positions, "spans": layout.spans}
        if layout.routes is not None:
            inputs["routes"] = layout.routes
        decoder = self.model.get_decoder()
        hidden = decoder(input_ids=layout.tokens, use_cache=False, **inputs).last_hidden_state
        rows = hidden.flatten(0, 1).index_select(0, layout.sources)
        return self.head(rows, layout, with_entropy, score_norms, top_k)


class _LMHead(nn.Module):
    """Has the LM head's weight as a direct parameter: ZeRO-3 gathers the parameters of the called module."""

    def __init__(
        self,
        lm_head: Any,
        transform: LogitTransform,
        temperature: float,
        chunk_mib: int,
        vocabulary: int | None,
    ) -> None:
        super().__init__()
        self._vocabulary, self._transform = vocabulary, transform
        self.weight = lm_head.weight
        self.bias = getattr(lm_head, "bias", None)
        self._temperature, self._chunk_bytes = temperature, chunk_mib * 2**20

    def forward(
        self,
        rows: Float[Tensor, "M D"],
        layout: Layout,
        with_entropy: bool,
        score_norms: bool,
        top_k: int,
    ) -> HeadOutputs:
        targets, temperature = layout.targets, layout.temperature
        how: dict[str, Any] = {
            "temperature": self._temperature if temperature is None else temperature,
            "chunk_tokens": max(1, self._chunk_bytes // (4 * self.weight.shape[0])),
            "bias": self.bias,
            "transform": self._transform,
        }
        if score_norms:
            return selected_score_norms(rows, self.weight, targets, mask=layout.mask, **how), None, None
        if top_k:
            return top_logprobs(rows, self.weight, targets, top_k, vocabulary=self._vocabulary, **how)
        how |= {"with_entropy": with_entropy, "mask": layout.mask}
        return selected_logprobs(rows, self.weight, targets, layout.candidates, **how)


def trainable_model(
    model_dir: str, dtype: torch.dtype, model: ModelConfig, policy: PolicyConfig, seed: int
) -> Any:
    """Load the transformers model, with adapters if ``policy`` trains only adapters. Raises ValueError for a
    model that it cannot train.
    """
    causal_lm = load_causal_lm(
        model_dir,
        dtype=dtype,
        attention=model.attention,
        trust_remote_code=model.trust_remote_code,
        gradient_checkpointing=model.gradient_checkpointing,
        packing=model.packing,
        # torch.compile does not read the package's autograd functions, and fuses these operations itself.
        kernels="torch" if policy.compile else model.kernels,
    )
    if policy.router_replay:
        replay_routes(causal_lm, model_dir)
    if policy.lora is not None:
        add_adapters(causal_lm, policy.lora, seed=seed)
        if start := find_start_adapter(Path(model_dir)):
            start_from(causal_lm, start.adapters())
    if policy.compile:
        compile_layers(causal_lm)
    check_heads(causal_lm, policy.sequence_parallel)
    return causal_lm
