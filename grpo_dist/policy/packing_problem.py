"""Whether a model reads rows that lie end to end in one stream: what its configuration says, and what its
first attention layer is called with, found with a forward pass of two tokens that have no values.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch

from grpo_dist.policy.attention import ATTENTION, NAME, NotCausal, register


def packing_problem(model: Any) -> str | None:
    """Return why ``model`` (transformers, with or without weights) cannot read a packed stream; None: it can.

    Its attention must go through transformers' registry as plain causal attention, and nothing else in it may
    mix tokens.
    """
    config = model.config.get_text_config()
    if mixing := mixing_layers(config):
        return f"it has layers of type {', '.join(mixing)}"
    if not getattr(model, "_supports_attention_backend", False):
        return "its attention does not go through transformers' registry"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "it caps attention logits (attn_logit_softcapping)"
    return _first_attention(model)


def mixing_layers(config: Any) -> list[str]:
    """Return the types of layers, sorted, in which tokens reach others by another way than attention to all
    before them, or to a window. ``config``: transformers' of a decoder.
    """
    return sorted(set(getattr(config, "layer_types", None) or ()) - ATTENTION)


def recurrent_layers(config: Any) -> list[str]:
    """Return the types of layers, sorted, that carry a state from token to token: linear attention, Mamba,
    convolutions. ``config``: transformers' of a decoder.
    """
    return [k for k in mixing_layers(config) if k == "linear_attention" or not k.endswith("attention")]


class _Reached(Exception):
    """The attention function has been called as packed rows need it."""


class _Probe:
    """Stands in for the spans of a stream."""

    def attend(self, *_: Any, **__: Any) -> torch.Tensor:
        raise _Reached


def _first_attention(model: Any) -> str | None:
    """Return why its first attention layer reads no stream; None: it does, or that is not known, for a model
    that computes with values before it attends. Such a one says so when it attends.
    """
    register()
    try:
        with torch.device("meta"):  # no memory, and whole also where ranks hold parts of the weights
            empty = type(model)(deepcopy(model.config)).eval()
            empty.set_attn_implementation(NAME)
            tokens = torch.zeros(1, 2, dtype=torch.long)
            places = torch.arange(2)[None]
            empty.get_decoder()(input_ids=tokens, position_ids=places, use_cache=False, spans=_Probe())
    except (_Reached, RuntimeError):  # RuntimeError: what has no values was asked for them
        return None
    except NotCausal:
        return "it needs more than causal attention, such as sinks, or does not pass on where rows are"
    return "its attention does not go through transformers' registry"
