"""The sizes of a model, from its config.json, or from a table of the families that recipes use."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_dist.config import ModelConfig, RewardModelConfig, SFTConfig
from grpo_dist.errors import UserError, expanded
from grpo_dist.policy.gguf_model import gguf_config, is_gguf
from grpo_dist.runtime.json_files import read_json
from grpo_dist.tools.bench.flops import Shape

# What a layer has in addition to the matrices of `Shape`, by model_type: biases of query, key and value;
# norms of query and key.
_BIAS = ("qwen2", "qwen2_moe")
_HEAD_NORMS = ("qwen3", "qwen3_moe")
_DENSE = ("qwen2", "qwen3", "llama", "mistral")
_EXPERTS = ("qwen2_moe", "qwen3_moe", "mixtral")
_NOWHERE = "neither a directory here, nor in the Hugging Face cache, nor a family whose sizes are known"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model.

    Attributes:
        name: a path or the id of a hub.
        shape: layers, widths and heads.
        parameters: each counted once, without a tied head.
        tied: embedding and LM head are one matrix.
    """

    name: str
    shape: Shape
    parameters: int
    tied: bool

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, or of the head."""
        return self.shape.vocabulary * self.shape.hidden

    @property
    def computing(self) -> int:
        """Weights that multiply a token on its way to logits."""
        return self.shape.layers * self.shape.layer_weights + self.embedding

    def read_for(self, sequences: float) -> float:
        """Return the weights that a decode step of ``sequences`` reads. Experts are equally likely, and count
        where any sequence uses them.
        """
        s = self.shape
        met = 1 - (1 - s.experts_per_token / s.experts) ** max(0.0, sequences - 1) if s.experts else 0.0
        return self.computing + s.layers * s.idle_weights * met

    def weight_bytes(self, itemsize: int, *, fp8: bool) -> int:
        """Return the bytes of all weights. ``fp8``: linear layers and experts have a byte a weight."""
        s = self.shape
        small = s.layers * (s.layer_weights + s.idle_weights - s.hidden * s.experts) if fp8 else 0
        return small + itemsize * (self.parameters - small)

    def read_bytes(self, sequences: float, itemsize: int, *, fp8: bool) -> float:
        """Return the bytes of `read_for`."""
        read = self.read_for(sequences)
        return read + (itemsize - 1) * self.embedding if fp8 else itemsize * read

    @property
    def without_head(self) -> int:
        """Parameters of the decoder without a head, as in a classifier."""
        return self.parameters if self.tied else self.parameters - self.embedding

    @property
    def expert_parameters(self) -> int:
        """Parameters of the routed experts of all layers, without shared ones."""
        s = self.shape
        return 3 * s.layers * s.experts * s.expert_width * s.hidden

    @property
    def route_numbers(self) -> int:
        """Numbers in the routes of one token: an expert for each layer and choice."""
        return self.shape.layers * self.shape.experts_per_token

    @property
    def route_bytes(self) -> int:
        """Bytes of the routes of one token, as `types.routes` keeps them."""
        return self.route_numbers * (1 if self.shape.experts <= 256 else 2)

    def kv_values(self) -> int:
        """Numbers in the key-value cache for one token."""
        return 2 * self.shape.layers * self.shape.kv_heads * self.shape.head_dim


def from_config_json(c: dict[str, Any], name: str) -> ModelShape:
    """Read a Hugging Face config.json. Raises UserError unless it is a decoder of a known type."""
    c = c.get("text_config", c)
    kind = c.get("model_type")
    if kind not in _DENSE + _EXPERTS:
        raise UserError(
            f"model {name}: `model_type` = {kind}; a plan knows the weights of {', '.join(_DENSE)} (dense "
            f"decoders with gated MLPs) and {', '.join(_EXPERTS)} (mixtures of experts)"
        )
    if kind in _EXPERTS and (c.get("mlp_only_layers") or c.get("decoder_sparse_step", 1) != 1):
        raise UserError(
            f"model {name}: `mlp_only_layers` or `decoder_sparse_step` makes some layers dense; a plan knows "
            "mixtures of experts whose layers are all alike"
        )
    try:
        shape = Shape.from_config(c)
    except KeyError as error:
        raise UserError(f"model {name}: its config.json has no {error}; expected a whole one") from error
    tied = bool(c.get("tie_word_embeddings", False))
    return ModelShape(name, shape, _count(shape, kind, tied), tied)


def _count(s: Shape, kind: str, tied: bool) -> int:
    layer = s.layer_weights + s.idle_weights + 2 * s.hidden  # two norms
    if kind in _BIAS:
        layer += (s.heads + 2 * s.kv_heads) * s.head_dim
    if kind in _HEAD_NORMS:
        layer += 2 * s.head_dim
    return s.layers * layer + s.hidden + (1 if tied else 2) * s.vocabulary * s.hidden


def _known(kind: str, *sizes: int, tied: bool, head_dim: int | None = None, **experts: int) -> dict[str, Any]:
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "vocab_size",
    )  # fmt: skip
    own = dict(zip(names, sizes, strict=True))
    return {"model_type": kind, **own, "tie_word_embeddings": tied, "head_dim": head_dim, **experts}


# Values of the config.json that each was published with on the Hugging Face hub.
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
    found = next((c for name, c in _PUBLISHED.items() if name.lower() == plain.lower()), None)
    return from_config_json(found, hub_id) if found else None


def model_of(model: ModelConfig, sft: SFTConfig | None, seed: int) -> ModelShape:
    """Return the sizes of ``model``: a directory, `demo:`, `random:`, the model of the cold start ``sft``, or
    a hub id in the local cache or the table here; nothing is fetched. ``seed``: of models of the demo.

    Raises UserError where the sizes are unknown.
    """
    path = model.path
    if path == "sft":
        assert sft is not None  # the configuration was checked
        path = sft.model
    if path.startswith("random:"):
        return _read(expanded(path.removeprefix("random:")), _policy(path))
    if path == "demo:smollm2":
        path = "HuggingFaceTB/SmolLM2-135M-Instruct"  # nothing is fetched
    if path.startswith("demo:"):
        from grpo_dist.demo.model import cached_model  # only for the models of the demo

        try:
            made = cached_model(path.removeprefix("demo:"), seed=seed) / "config.json"
            return _read(made, _policy(path))
        except ValueError as error:
            raise UserError(str(error)) from error
    if is_gguf(path):
        try:
            return from_config_json(gguf_config(expanded(path), _policy(path)), path)
        except ValueError as error:
            raise UserError(str(error)) from error
    if found := _known_locally(path, model.revision, _policy(path)):
        return found
    raise UserError(
        f"{_policy(path)}: {_NOWHERE} ({', '.join(_PUBLISHED)}); fetch its config.json and plan with "
        "model.path=random:config.json"
    )


def classifier_of(settings: RewardModelConfig) -> ModelShape:
    """Return the decoder of a reward model, from the places of `model_of`. Raises UserError where its sizes
    are unknown.
    """
    where = f"path = {settings.path}"
    if found := _known_locally(settings.path, settings.revision, where):
        return found
    raise UserError(f"{where}: {_NOWHERE}; put its config.json in a directory and plan with that as `path`")


def _policy(path: str) -> str:
    return f"model.path = {path}"


def _known_locally(path: str, revision: str | None, where: str) -> ModelShape | None:
    """Look in a directory, the local cache, and the table of published models."""
    local = expanded(path)
    if local.is_dir():
        return _read(local / "config.json", where)
    if cached := _in_hub_cache(path, revision):
        return _read(cached, where)
    return published(path)


def _in_hub_cache(hub_id: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(hub_id, "config.json", revision=revision)
    except HFValidationError:  # a path that is no hub id
        return None
    return Path(found) if isinstance(found, str) else None


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
