"""Sizes of a model, from its config.json, transformers' model without weights, or a table of models."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from grpo_dist.batch.sharding import micro_batches
from grpo_dist.config import Config, ModelConfig, RewardModelConfig, SFTConfig, TeacherConfig
from grpo_dist.config.files import load_recorded
from grpo_dist.errors import UserError, as_user_errors, expanded, searched
from grpo_dist.runtime.files import read_json
from grpo_dist.runtime.model_config import heads_of_layers, keep_attention_cap, position_limit
from grpo_dist.runtime.model_files import cached, describe_gguf, is_checkpoint
from grpo_dist.tools.bench.flops import Shape

# Decoder types whose weights are counted from config.json, without importing transformers: (biases of query,
# key and value; norms of query and key).
_BIAS = ("qwen2", "qwen2_moe")
_HEAD_NORMS = ("qwen3", "qwen3_moe")
_DENSE = ("qwen2", "qwen3", "llama", "mistral")
_EXPERTS = ("qwen2_moe", "qwen3_moe", "mixtral")
# Keys for further biases, or for two kinds of layers.
_OTHERWISE = ("attention_bias", "mlp_bias", "mlp_only_layers")
# Keys for the number of experts per token.
_USED_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k")
_MEASURED_VERSION = 3  # version of cached sizes; increment if a measurement changes
_MIXES_TOKENS = re.compile(r"attn|attention|mamba|mixer|conv|recurrent|router|\.gate\.")  # in a path
_NOWHERE = "neither a directory here, nor in the Hugging Face cache, nor a family whose sizes are known"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model.

    Attributes:
        name: a path or hub id.
        shape: layers, widths and heads.
        parameters: parameter count, without a tied head.
        tied: embedding and LM head are one matrix.
        linear_sides: sum of inputs and outputs of linear layers by name, over all layers.
        cached: key-value cache values per token.
        positions: maximum sequence length; None: unknown.
        attention: "fused"; "eager", which stores values per token pair, as with a cap; "sinks", which stores
            fewer.
    """

    name: str
    shape: Shape
    parameters: int
    tied: bool
    linear_sides: Mapping[str, int] = field(default_factory=dict)
    cached: int = 0
    positions: int | None = None
    attention: str = "fused"

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, or of the head."""
        return self.shape.vocabulary * self.shape.hidden

    @property
    def computing(self) -> int:
        """Weights that multiply a token between embedding and logits."""
        return self.shape.layers * self.shape.layer_weights + self.embedding

    def read_for(self, sequences: float) -> float:
        """Return the weights read by a decode step of ``sequences``. Experts are equally likely, and count if
        any sequence uses them.
        """
        s = self.shape
        met = 1 - (1 - s.experts_per_token / s.experts) ** max(0.0, sequences - 1) if s.experts else 0.0
        return self.computing + s.layers * s.idle_weights * met

    def weight_bytes(self, itemsize: int, *, fp8: bool) -> int:
        """Return the bytes of all weights. ``fp8``: linear layers and experts have a byte per weight."""
        s = self.shape
        small = s.layers * (s.layer_weights + s.idle_weights - s.hidden * s.experts) if fp8 else 0
        return small + itemsize * (self.parameters - small)

    def read_bytes(self, sequences: float, itemsize: int, *, fp8: bool) -> float:
        """Return `read_for` in bytes."""
        read = self.read_for(sequences)
        return read + (itemsize - 1) * self.embedding if fp8 else itemsize * read

    @property
    def without_head(self) -> int:
        """Parameters without the LM head, as in a classifier."""
        return self.parameters if self.tied else self.parameters - self.embedding

    @property
    def route_numbers(self) -> int:
        """Route values per token: an expert per layer and choice."""
        return self.shape.layers * self.shape.experts_per_token

    @property
    def route_bytes(self) -> int:
        """Bytes of the routes per token (`types.routes`)."""
        return self.route_numbers * (1 if self.shape.experts <= 256 else 2)

    def kv_values(self, tensor_parallel: int = 1) -> int:
        """Return the key-value cache values per token on each of ``tensor_parallel`` GPUs, which split key
        heads but not a single head.
        """
        heads = self.shape.kv_heads
        return self.cached * max(1, heads // tensor_parallel) // heads


def from_config_json(c: dict[str, Any], name: str) -> ModelShape:
    """Read a decoder's sizes from a Hugging Face config.json: from its keys if these suffice, else from
    transformers' model without weights. Raises UserError if both fail.
    """
    whole, c = c, dict(c.get("text_config") or c)
    if "tie_word_embeddings" in whole:
        c.setdefault("tie_word_embeddings", whole["tie_word_embeddings"])
    kind = c.get("model_type")
    is_alike = not any(c.get(key) for key in _OTHERWISE) and c.get("decoder_sparse_step", 1) == 1
    if kind not in _DENSE + _EXPERTS or not is_alike:
        return replace(_measured(c, name), name=name)
    try:
        shape = Shape.from_config(c)
    except KeyError as error:
        raise UserError(f"model {name}: its config.json has no {error}; expected a whole one") from error
    tied = bool(c.get("tie_word_embeddings", False))
    return ModelShape(
        name,
        shape,
        _count(shape, kind, tied),
        tied,
        linear_sides=_linear_sides(shape),
        cached=2 * shape.layers * shape.kv_heads * shape.head_dim,
        positions=position_limit(c),
    )


def _count(s: Shape, kind: str, tied: bool) -> int:
    layer = s.layer_weights + s.idle_weights + 2 * s.hidden  # two norms
    if kind in _BIAS:
        layer += (s.heads + 2 * s.kv_heads) * s.head_dim
    if kind in _HEAD_NORMS:
        layer += 2 * s.head_dim
    return s.layers * layer + s.hidden + (1 if tied else 2) * s.vocabulary * s.hidden


def _linear_sides(s: Shape) -> dict[str, int]:
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    width = s.shared_width if s.experts else s.intermediate  # experts are not linear layers
    sides = {
        "q_proj": s.hidden + q, "k_proj": s.hidden + kv, "v_proj": s.hidden + kv, "o_proj": q + s.hidden,
    }  # fmt: skip
    if width:
        sides |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), s.hidden + width)
    if s.shared_width:
        sides["shared_expert_gate"] = s.hidden + 1
    return {name: s.layers * both for name, both in sides.items()}


def _measured(c: dict[str, Any], name: str) -> ModelShape:
    """Cache `_measure` per configuration: importing transformers takes seconds."""
    decides = {"config": c, "transformers": version("transformers"), "version": _MEASURED_VERSION}

    def write(directory: Path) -> None:
        (directory / "sizes.json").write_text(json.dumps(asdict(_measure(c, name))))

    sizes = read_json(cached("model-sizes", decides, write) / "sizes.json")
    return ModelShape(**sizes | {"shape": Shape(**sizes["shape"])})


def _measure(c: dict[str, Any], name: str) -> ModelShape:
    """Count the parameters of transformers' model for configuration ``c``, created without weights.

    Expert weights count per token by the share of experts used. Layers other than attention (or its
    replacement) and norms count as gated MLPs with the same number of weights.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM  # heavy: only for types that are not known here

    from grpo_dist.policy.attention import attention_layers

    kind = c.get("model_type")
    try:
        config = AutoConfig.for_model(kind, **{key: value for key, value in c.items() if key != "model_type"})
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        keep_attention_cap(model)
        text = config.get_text_config()
        hidden, layers, attention = text.hidden_size, text.num_hidden_layers, heads_of_layers(text)
    except Exception as error:  # a model type's code may raise anything
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"model {name}: `model_type` = {kind}: transformers makes no decoder with attention of its "
            f"config.json ({reason}); plan with the sizes of a similar model: model.path=random:config.json"
        ) from error
    tables = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
    all_modules = dict(model.named_modules())
    experts, of_experts, dense, mlps = 0, 0, 0, 0
    for path, parameter in model.named_parameters():
        owner = all_modules[path.rpartition(".")[0]]
        if parameter in tables or parameter.ndim < 2 or isinstance(owner, torch.nn.Embedding):
            continue
        index = re.search(r"\.experts\.(\d+)\.", path)
        if index or ".experts." in path or (parameter.ndim == 3 and not isinstance(owner, torch.nn.Conv1d)):
            experts = max(experts, int(index[1]) + 1 if index else parameter.shape[0])
            of_experts += parameter.numel()
            continue
        dense += parameter.numel()
        mlps += 0 if _MIXES_TOKENS.search(path) else parameter.numel()
    used = next((int(n) for key in _USED_EXPERTS if (n := getattr(text, key, None))), 0) if experts else 0
    if experts and not used:
        raise UserError(f"model {name}: its config.json does not say how many experts a token uses")
    active = of_experts * used // max(1, experts)
    linears = {
        path: module
        for path, module in all_modules.items()
        if isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings()
    }
    sides: dict[str, int] = {}
    for path, linear in linears.items():
        last = path.rpartition(".")[2]
        sides[last] = sides.get(last, 0) + linear.in_features + linear.out_features
    if latent := getattr(text, "kv_lora_rank", None):
        # Caches one vector for all heads; queries and keys, and values, have other sizes.
        size = (text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim) // 2
        attention = [replace(heads, size=size) for heads in attention]
        cached_values = layers * (latent + text.qk_rope_head_dim)
    else:
        keys = sum(linear.out_features for path, linear in linears.items() if path.endswith(".k_proj"))
        each = sum(heads.keys * heads.size for heads in attention) / layers
        cached_values = round(2 * (keys or attention_layers(text) * each))
    norms = sum("Norm" in type(m).__name__ and _width(m) in (hidden, None) for m in all_modules.values()) - 1
    shape = Shape(
        hidden=hidden,
        layers=layers,
        heads=attention[0].queries,
        kv_heads=1 if latent else attention[0].keys,
        head_dim=round(sum(h.size for h in attention) / layers),
        intermediate=round((mlps + active) / (3 * hidden * layers)),
        vocabulary=model.get_output_embeddings().weight.shape[0],
        experts=experts,
        experts_per_token=used,
        expert_width=round(of_experts / (3 * hidden * layers * experts)) if experts else 0,
        matrices=(dense + active) // layers,
        norms=max(0, round(norms / layers)),
    )
    return ModelShape(
        name,
        shape,
        sum(p.numel() for p in model.parameters()),
        tied=len(tables) == 1,
        linear_sides=sides,
        cached=cached_values,
        positions=position_limit(text.to_dict()),
        attention=_attention(model),
    )


def _attention(model: Any) -> str:
    if model.config._attn_implementation != "eager":
        return "fused"
    return "sinks" if any(name.endswith(".sinks") for name, _ in model.named_parameters()) else "eager"


def _width(norm: Any) -> int | None:
    weight = getattr(norm, "weight", None)
    return None if weight is None else weight.numel()


def _known(kind: str, *sizes: int, tied: bool, head_dim: int | None = None, **experts: int) -> dict[str, Any]:
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "vocab_size",
    )  # fmt: skip
    return {"model_type": kind, **dict(zip(names, sizes, strict=True)), "tie_word_embeddings": tied,
            "head_dim": head_dim, **experts}  # fmt: skip


# Values from the published config.json on the Hugging Face hub.
_PUBLISHED = {
    "Qwen/Qwen2.5-0.5B": _known("qwen2", 896, 4864, 24, 14, 2, 151936, tied=True),
    "Qwen/Qwen2.5-1.5B": _known("qwen2", 1536, 8960, 28, 12, 2, 151936, tied=True),
    "Qwen/Qwen2.5-3B": _known("qwen2", 2048, 11008, 36, 16, 2, 151936, tied=True),
    "Qwen/Qwen2.5-7B": _known("qwen2", 3584, 18944, 28, 28, 4, 152064, tied=False),
    "Qwen/Qwen2.5-14B": _known("qwen2", 5120, 13824, 48, 40, 8, 152064, tied=False),
    "Qwen/Qwen2.5-32B": _known("qwen2", 5120, 27648, 64, 40, 8, 152064, tied=False),
    "Qwen/Qwen2.5-72B": _known("qwen2", 8192, 29568, 80, 64, 8, 152064, tied=False),
    "Qwen/Qwen3-0.6B": _known("qwen3", 1024, 3072, 28, 16, 8, 151936, tied=True, head_dim=128),
    "Qwen/Qwen3-1.7B": _known("qwen3", 2048, 6144, 28, 16, 8, 151936, tied=True, head_dim=128),
    "Qwen/Qwen3-4B": _known("qwen3", 2560, 9728, 36, 32, 8, 151936, tied=True, head_dim=128),
    "Qwen/Qwen3-8B": _known("qwen3", 4096, 12288, 36, 32, 8, 151936, tied=False, head_dim=128),
    "Qwen/Qwen3-14B": _known("qwen3", 5120, 17408, 40, 40, 8, 151936, tied=False, head_dim=128),
    "Qwen/Qwen3-32B": _known("qwen3", 5120, 25600, 64, 64, 8, 151936, tied=False, head_dim=128),
    "Qwen/Qwen3-30B-A3B": _known(
        "qwen3_moe", 2048, 6144, 48, 32, 4, 151936, tied=False, head_dim=128,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
    ),
    "Qwen/Qwen1.5-MoE-A2.7B": _known(
        "qwen2_moe", 2048, 5632, 24, 16, 16, 151936, tied=False, num_experts=60, num_experts_per_tok=4,
        moe_intermediate_size=1408, shared_expert_intermediate_size=5632,
    ),
    "mistralai/Mixtral-8x7B-v0.1": _known(
        "mixtral", 4096, 14336, 32, 32, 8, 32000, tied=False, num_local_experts=8, num_experts_per_tok=2
    ),
    "meta-llama/Llama-3.2-1B": _known("llama", 2048, 8192, 16, 32, 8, 128256, tied=True, head_dim=64),
    "meta-llama/Llama-3.2-3B": _known("llama", 3072, 8192, 28, 24, 8, 128256, tied=True, head_dim=128),
    "meta-llama/Llama-3.1-8B": _known("llama", 4096, 14336, 32, 32, 8, 128256, tied=False),
    "meta-llama/Llama-3.1-70B": _known("llama", 8192, 28672, 80, 64, 8, 128256, tied=False),
    "HuggingFaceTB/SmolLM2-135M": _known("llama", 576, 1536, 30, 9, 3, 49152, tied=True),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": _known(
        "qwen2", 1536, 8960, 28, 12, 2, 151936, tied=False
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": _known("qwen2", 3584, 18944, 28, 28, 4, 152064, tied=False),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B": _known("qwen2", 5120, 13824, 48, 40, 8, 152064, tied=False),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": _known("qwen2", 5120, 27648, 64, 40, 8, 152064, tied=False),
}  # fmt: skip


def published(hub_id: str) -> ModelShape | None:
    """Return the shape of a published model. A family's -Instruct, -Base, -Math and -Coder share one."""
    plain = re.sub(r"-(Instruct|Base|Math|Coder)(?=-|$)", "", hub_id)
    config = next((c for name, c in _PUBLISHED.items() if name.lower() == plain.lower()), None)
    return from_config_json(config, hub_id) if config else None


def model_of(model: ModelConfig, sft: SFTConfig | None, seed: int) -> ModelShape:
    """Return the sizes of ``model``: a directory, a run's checkpoint, `demo:`, `random:`, the model of the
    cold start ``sft``, or a hub id in the local cache or this file's table; nothing is downloaded. ``seed``:
    seed of demo models.

    Raises UserError if the sizes are unknown.
    """
    path = model.path
    if is_checkpoint(path):
        return _read_run(path)
    if path == "sft":
        assert sft is not None  # the configuration was checked
        path = sft.model
    if path.startswith("random:"):
        return _read(expanded(path.removeprefix("random:")), _policy(path))
    if path == "demo:smollm2":
        path = "HuggingFaceTB/SmolLM2-135M-Instruct"  # nothing is downloaded
    if path.startswith("demo:"):
        from grpo_dist.demo.model import cached_model  # only for the models of the demo

        with as_user_errors():
            return _read(cached_model(path.removeprefix("demo:"), seed=seed) / "config.json", _policy(path))
    if shape := _known_locally(path, model.revision, _policy(path)):
        return shape
    if (file := expanded(path)).is_file():
        what = describe_gguf(file) if file.suffix.lower() == ".gguf" else "the directory that holds it"
        raise UserError(f"{_policy(path)}: a file; expected {what}")
    if file.is_absolute() or path.startswith((".", "~")) or path.count("/") != 1:
        raise UserError(
            f"{_policy(path)}: no such directory{searched(path)}; write one that has config.json, "
            "model.path=random:config.json if you have only that, or the id of a model of the same size: "
            f"{', '.join(_PUBLISHED)}"
        )
    raise UserError(
        f"{_policy(path)}: {_NOWHERE} ({', '.join(_PUBLISHED)}); fetch its config.json and plan with "
        "model.path=random:config.json"
    )


def _read_run(path: str) -> ModelShape:
    """Return the sizes of a run's checkpoint, read from the run's initial model."""
    from grpo_dist.runs.run_weights import find_checkpoint, is_supervised_run  # imports the rewards

    with as_user_errors():
        checkpoint = find_checkpoint(path, lambda _: None)
        config = load_recorded(checkpoint / "config.yaml")
    model, sft = config.model, config.sft
    if sft is not None and is_supervised_run(checkpoint.parents[1]):
        model = model.model_copy(update={"path": "sft"})
    return model_of(model, sft, config.seed)


@dataclass(frozen=True, slots=True)
class FrozenModel:
    """A model that scores finished samples. ``settings``: a teacher's or reward model's; None: the reference,
    which has the policy's sizes.
    """

    shape: ModelShape
    settings: TeacherConfig | RewardModelConfig | None = None

    @property
    def is_reward_model(self) -> bool:
        return isinstance(self.settings, RewardModelConfig)

    @property
    def role(self) -> str:
        """Row name in the memory table."""
        if self.settings is None:
            return "reference"
        return f"{'reward model' if self.is_reward_model else 'teacher'} {self.settings.name}"

    def weight_bytes(self, itemsize: int, *, gpu: bool) -> int:
        """Return the bytes per device. A tensor-parallel reward model replicates its embedding and has no
        head. ``itemsize``: bytes per policy weight, also for the reference and teachers.
        """
        if not isinstance(self.settings, RewardModelConfig):
            return self.shape.parameters * itemsize
        split = self.shape.without_head - self.shape.embedding
        parameters = self.shape.embedding + -(-split // self.settings.tensor_parallel_size)
        return parameters * itemsize_of(self.settings.dtype, gpu=gpu)

    def on_a_whole_gpu(self) -> FrozenModel:
        """Return this model on a whole GPU, as if colocated with other roles."""
        if not isinstance(self.settings, RewardModelConfig):
            return self
        return replace(self, settings=self.settings.model_copy(update={"gpu_share": 1.0}))

    def padded_flops(self, prompt: int, lengths: Sequence[int]) -> float:
        """Return a reward model's operations for one prompt with completions of ``lengths`` tokens, batched
        as in `Classifier`. Padding counts; the head, one or two rows, does not.
        """
        assert isinstance(self.settings, RewardModelConfig)
        s, rows = self.shape.shape, [prompt + length for length in lengths]
        total = 0.0
        for batch in micro_batches(rows, self.settings.micro_batch_tokens):
            longest = max(rows[i] for i in batch)
            weights = s.layers * s.layer_weights * longest
            pairs = longest * (longest + 1) / 2
            total += len(batch) * (2 * weights + 4 * s.layers * s.heads * s.head_dim * pairs)
        return total


def frozen_models(config: Config) -> tuple[tuple[FrozenModel, ...], dict[str, str]]:
    """Return teachers and reward models with known sizes, and the reason by name for other reward models.
    Raises UserError for a teacher of unknown size.
    """
    models = [
        FrozenModel(model_of(teacher.model_section(config.model), config.sft, config.seed), teacher)
        for teacher in config.distillation.teachers_with_workers
    ]
    unknown = {}
    for settings in config.rewards.models:
        try:
            models.append(FrozenModel(_reward_model_shape(settings), settings))
        except UserError as error:
            unknown[settings.name] = str(error)
    return tuple(models), unknown


def _reward_model_shape(settings: RewardModelConfig) -> ModelShape:
    key = f"path = {settings.path}"
    if shape := _known_locally(settings.path, settings.revision, key):
        return shape
    raise UserError(f"{key}: {_NOWHERE}; put its config.json in a directory and plan with that as `path`")


def itemsize_of(dtype: str, *, gpu: bool) -> int:
    """Return the bytes per weight like `hardware.resolve_dtype`, without querying this machine's GPU."""
    return 2 if dtype == "bfloat16" or (dtype == "auto" and gpu) else 4


def _policy(path: str) -> str:
    return f"model.path = {path}"


def _known_locally(path: str, revision: str | None, where: str) -> ModelShape | None:
    """Search a directory, the local cache, and the table of published models."""
    local = expanded(path)
    if local.is_dir():
        return _read(local / "config.json", where)
    if cached := _in_hub_cache(path, revision):
        return _read(cached, where)
    return published(path)


def _in_hub_cache(hub_id: str, revision: str | None) -> Path | None:
    # The library takes a second to import, and knows nothing of a model without a directory.
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or Path(home, "hub")
    if not Path(os.path.expandvars(cache), f"models--{hub_id.replace('/', '--')}").expanduser().is_dir():
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config_path = try_to_load_from_cache(hub_id, "config.json", revision=revision)
    except HFValidationError:  # a path, not a hub id
        return None
    return Path(config_path) if isinstance(config_path, str) else None


def _read(file: Path, where: str) -> ModelShape:
    """``where``: the key and its value, ``model.path = some/model``."""
    try:
        content = read_json(file)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{where}: {file} cannot be read ({error}); expected the config.json of a Hugging Face model"
        ) from error
    if not isinstance(content, dict):
        raise UserError(f"{where}: {file} is no object; expected a Hugging Face config.json")
    return from_config_json(content, where.partition(" = ")[2])
