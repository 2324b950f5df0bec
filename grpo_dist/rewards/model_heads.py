"""Process reward models whose scores `transformers` has no class for: a decoder, and a head of its own kind.

qwen                    score: Linear, ReLU, Linear to 2     softmax, the second label   arXiv:2501.07301
skywork                 v_head.summary: Linear to 1          sigmoid                     Skywork-o1-Open-PRM
math_shepherd, rlhflow  the LM head's rows of two tokens     softmax, the first token    arXiv:2312.08935

Only the hidden states at the ends of steps reach a head, so no logits of a vocabulary are kept.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from grpo_dist.config import RewardModelConfig
from grpo_dist.runtime.logit_transform import IDENTITY, LogitTransform

VERDICTS = ("+", "-")  # good and bad, where `verdict_tokens` is null
_PREFIXES = {"qwen": "score.", "skywork": "v_head.summary."}


class StepHead(nn.Module):
    """Probability in [0, 1] that a step is good, from the hidden state at its end. Computes in float32."""

    def __init__(self, layers: nn.Module, good: int | None, transform: LogitTransform = IDENTITY) -> None:
        super().__init__()
        self.layers, self._good, self._transform = layers.float(), good, transform

    def forward(self, hidden: Float[Tensor, "N H"]) -> Float[Tensor, " N"]:
        logits = self._transform.apply_(self.layers(hidden.float()))
        return logits[:, 0].sigmoid() if self._good is None else logits.softmax(-1)[:, self._good]


def load_with_head(
    settings: RewardModelConfig, source: str, tokenizer: Any, dtype: torch.dtype
) -> tuple[Any, StepHead]:
    """Return the decoder, whose output has ``last_hidden_state``, and the head of `settings.format`.

    Raises:
        ValueError: weights of the decoder or the head are missing or of another shape.
    """
    from transformers import AutoModel, AutoModelForCausalLM  # heavy: only for runs with reward models

    of_verdicts = settings.format in ("math_shepherd", "rlhflow")
    auto = AutoModelForCausalLM if of_verdicts else AutoModel
    # Never the code that ships with the model: its decoder is the plain one, and the head is made here.
    model, info = auto.from_pretrained(
        source, revision=settings.revision, dtype=dtype, output_loading_info=True, **split_over(settings)
    )
    if info["missing_keys"]:  # transformers would initialise them at random
        raise ValueError(
            f"rewards.models {settings.name}: path = {settings.path} has no weights for "
            f"{', '.join(sorted(info['missing_keys'])[:3])}; expected a trained model of format "
            f"{settings.format}"
        )
    if not of_verdicts:
        return model, _own_head(settings, source, model.config.get_text_config().hidden_size)
    lm_head, ids = model.get_output_embeddings(), verdict_ids(settings, tokenizer)

    def rows(values: Tensor) -> nn.Parameter:
        values = values.full_tensor() if hasattr(values, "full_tensor") else values  # of a split model
        return nn.Parameter(values[ids].detach().float().clone())

    layers = nn.Linear(lm_head.weight.shape[1], 2, bias=getattr(lm_head, "bias", None) is not None)
    layers.weight = rows(lm_head.weight)
    if layers.bias is not None:
        layers.bias = rows(lm_head.bias)
    return model.base_model, StepHead(layers, good=0, transform=verdict_transform(model.config))


def verdict_ids(settings: RewardModelConfig, tokenizer: Any) -> list[int]:
    """Return the token ids of the good and the bad verdict.

    Raises ValueError where they are not two known tokens.
    """
    texts = settings.verdict_tokens or VERDICTS
    # The last one: SentencePiece tokenizers may put a token of a leading space before it.
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"][-1] for text in texts]
    if ids[0] == ids[1] or (tokenizer.unk_token_id in ids and tokenizer.unk_token not in texts):
        raise ValueError(f"its tokenizer does not tell the verdicts {list(texts)} apart; set verdict_tokens")
    return ids


def split_over(settings: RewardModelConfig) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained`` that give this process its part of a split model."""
    if settings.tensor_parallel_size == 1:
        return {}
    from transformers.distributed import DistributedConfig  # heavy, as above

    return {"distributed_config": DistributedConfig(tp_size=settings.tensor_parallel_size)}


def check_split(config: Any, size: int) -> None:
    """Raise ValueError for a model that cannot be split over ``size`` devices."""
    if size == 1:
        return
    text = config.get_text_config()
    if not getattr(text, "base_model_tp_plan", None):
        raise ValueError(
            f"tensor_parallel_size = {size}: model_type {text.model_type} has no plan for splitting it in "
            "transformers; use 1 or another model"
        )
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if (getattr(text, key, None) or 0) % size:
            raise ValueError(
                f"tensor_parallel_size = {size} does not divide its {key} = {getattr(text, key)}; use a "
                "divisor of it"
            )


def verdict_transform(config: Any) -> LogitTransform:
    """Return what a model of ``config`` does to the logits of verdicts behind its LM head. Reads no weights.
    Raises ValueError where that is not known.
    """
    from transformers import AutoModelForCausalLM  # heavy, as above

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return LogitTransform.from_model(model)


def _own_head(settings: RewardModelConfig, source: str, hidden: int) -> StepHead:
    layers: nn.Module = nn.Linear(hidden, 1)
    if settings.format == "qwen":
        layers = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 2))
    prefix = _PREFIXES[settings.format]
    wanted = list(layers.state_dict())
    tensors = _tensors(settings, source, [prefix + name for name in wanted])
    try:
        layers.load_state_dict({name: tensors[prefix + name].float() for name in wanted})
    except (KeyError, RuntimeError) as error:
        raise ValueError(
            f"rewards.models {settings.name}: path = {settings.path} has no head of format {settings.format} "
            f"({error}); expected weights {', '.join(prefix + name for name in wanted)} for hidden size "
            f"{hidden}; use another model or format"
        ) from error
    return StepHead(layers, good=1 if settings.format == "qwen" else None)


def _tensors(settings: RewardModelConfig, source: str, names: Sequence[str]) -> dict[str, Tensor]:
    """Read those of ``names`` that the safetensors files of ``source`` have."""
    from safetensors import safe_open
    from transformers.utils.hub import cached_file

    def file(name: str) -> str | None:
        return cached_file(
            source, name, revision=settings.revision, _raise_exceptions_for_missing_entries=False
        )

    shards = {"model.safetensors"}
    if index := file("model.safetensors.index.json"):
        places = json.loads(Path(index).read_text())["weight_map"]
        shards = {places[name] for name in names if name in places}
    found: dict[str, Tensor] = {}
    for shard in sorted(shards):
        if (path := file(shard)) is None:
            continue  # the caller names the weights that are absent
        with safe_open(path, framework="pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in names if name in tensors.keys()}  # noqa: SIM118
    return found
