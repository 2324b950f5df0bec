"""Read properties of the forward pass from a model's configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# Keys of the maximum sequence length, by family; the first that is present counts.
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")


def position_limit(text_config: Mapping[str, Any]) -> int | None:
    """Return the longest sequence, in tokens, for which engine and trainer compute the same positions; None
    if the configuration does not say.

        yarn      factor x original positions: model cards keep `max_position_embeddings` unscaled
        linear    factor x `max_position_embeddings`, which Gemma 3 has already scaled
        llama3    `max_position_embeddings`, already scaled
        dynamic   `max_position_embeddings`: beyond, frequencies depend on the longest row of a batch
        longrope  the original positions, for the same reason

    Cohere 2 is limited to its sliding window: it is one token longer in vLLM 0.32 than in transformers 5.19.

    ``text_config``: config.json of a text model, or its text section.
    """
    most = next((int(text_config[key]) for key in _POSITIONS if text_config.get(key)), None)
    if most is None:
        return None
    if str(text_config.get("model_type")).startswith("cohere2") and text_config.get("sliding_window"):
        most = min(most, int(text_config["sliding_window"]))
    return min((_scaled(rope, most, text_config) for rope in _rope_parameters(text_config)), default=most)


def length_problem(limit: int | None, longest: int, model: str, *, supervised: bool) -> str | None:
    """Return why ``model``, with `position_limit` ``limit``, accepts no row of ``longest`` tokens; None if it
    does. ``supervised``: rows are demonstrations, not prompts with completions.
    """
    if limit is None or longest <= limit:
        return None
    takes = (
        f"{model} takes at most {limit} positions (max_position_embeddings and rope scaling in its "
        "config.json)"
    )
    if supervised:
        return f"sft.max_length = {longest}, but {takes}; lower it"
    return (
        f"prompt + completion may be {longest} tokens (data.max_prompt_tokens + sampling.max_new_tokens), "
        f"but {takes}; lower one of the two"
    )


def _scaled(rope: Mapping[str, Any], most: int, text_config: Mapping[str, Any]) -> int:
    kind, factor = rope.get("rope_type") or rope.get("type"), rope.get("factor")
    original = rope.get("original_max_position_embeddings")
    original = original or text_config.get("original_max_position_embeddings") or most
    if kind == "yarn" and factor:
        return int(original * factor)
    if kind in ("longrope", "su"):
        return int(original)
    if kind == "linear" and factor and "gemma3" not in str(text_config.get("model_type")):
        return int(most * factor)
    return most


def _rope_parameters(text_config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the rope parameters of each layer type; older files call them `rope_scaling`."""
    rope = text_config.get("rope_parameters") or text_config.get("rope_scaling") or {}
    parts = [parameters for parameters in rope.values() if isinstance(parameters, Mapping)]
    yield from parts or [rope]


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention heads of one layer: query heads, key-value heads, and head size."""

    queries: int
    keys: int
    size: int


def heads_of_layers(text_config: Any) -> list[Heads]:
    """Return the heads of each layer; in Gemma 4 layers differ. ``text_config``: of transformers."""
    count = int(text_config.num_hidden_layers)
    layers = getattr(text_config, "per_layer_config", None) or [text_config] * count
    return [_heads(layers[i]) for i in range(count)]


def _heads(layer: Any) -> Heads:
    queries = int(layer.num_attention_heads)
    keys = getattr(layer, "num_key_value_heads", None) or queries
    return Heads(queries, int(keys), int(getattr(layer, "head_dim", None) or layer.hidden_size // queries))


def keep_attention_cap(model: Any) -> None:
    """Make a transformers ``model`` that caps attention logits use eager attention instead of torch's
    `scaled_dot_product_attention`, which ignores the cap.
    """
    capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    if capped and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")
