"""Router replay: the trainer uses the experts that the engine chose for each token (`policy.router_replay`).

Engine and trainer round differently. Where two experts are almost tied, they choose different ones, and the
log-probs of the token and of all later tokens differ by far more than rounding. Replaying the engine's choice
makes both the same function again: Rollout Routing Replay, arXiv:2510.11370.

    router logits z [N, E]  ->  p = softmax(z)  ->  top-k, or the replayed experts  ->  weights p[experts]

The weights come from the current logits, so the router is trained as before; only the choice, which has no
gradient in either case, is the engine's. The routes are an argument of each decoder layer's call, so that
gradient checkpointing recomputes a layer with the same routes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from grpo_dist.runtime.hardware import sent
from grpo_dist.types import Routes, TrainBatch

# Architectures whose router in transformers is a softmax over all experts and a top-k of it.
SUPPORTED = ("mixtral", "qwen2_moe", "qwen3_moe")
_UNKNOWN = -1  # the model chooses


def replay_problem(config: Any) -> str | None:
    """Return why routes cannot be replayed in a model of this transformers configuration; None: they can."""
    text = config.get_text_config()
    if text.model_type in SUPPORTED:
        return None
    has_experts = any(
        getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")
    )
    what = "a router that it does not know" if has_experts else "no experts"
    return f"policy.router_replay: {text.model_type} has {what}; it replays {', '.join(SUPPORTED)}"


def replay_routes(model: Any, model_dir: str) -> None:
    """Make ``model`` (transformers) use the experts of `Layout.routes`, where it gets any.

    Raises ValueError for an architecture without experts, or with another kind of router.
    """
    if problem := replay_problem(model.config):
        raise ValueError(f"model {model_dir}: {problem}; remove policy.router_replay")
    for index, layer in enumerate(model.get_decoder().layers):
        replay = _LayerReplay(index)
        layer.register_forward_pre_hook(replay.begin, with_kwargs=True)
        if isinstance(gate := getattr(layer.mlp, "gate", None), nn.Module):  # a dense layer has none
            gate.register_forward_hook(replay.route)


class _LayerReplay:
    """Passes the routes in a decoder layer's arguments to its router."""

    def __init__(self, layer: int) -> None:
        self._layer = layer
        self._experts: Tensor | None = None

    def begin(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        routes = kwargs.get("routes")
        self._experts = None if routes is None else routes[:, self._layer].long()
        return args, {name: value for name, value in kwargs.items() if name != "routes"}

    def route(
        self, gate: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the router's logits [N, E], and weights and experts [N, k] of the replayed choice."""
        logits, weights, chosen = output
        if self._experts is None:
            return output
        experts = torch.where(self._experts == _UNKNOWN, chosen, self._experts)
        replayed = torch.softmax(logits, dim=-1, dtype=torch.float).gather(1, experts)
        if getattr(gate, "norm_topk_prob", True):  # Mixtral always does
            replayed = replayed / replayed.sum(dim=-1, keepdim=True)
        return logits, replayed.to(weights.dtype), experts


def fetched(routes: Sequence[Routes | None]) -> list[np.ndarray | None]:
    """Return the routes of each row, [T', L, k]. Raises RuntimeError when some are lost."""
    return [None if route is None else route.fetch() for route in routes]


def lay_out_routes(
    routes: Sequence[np.ndarray | None], indices: np.ndarray, size: int, device: torch.device
) -> Int[Tensor, "N L K"] | None:
    """Return the routes of each token of a stream of ``size`` tokens, int16, -1 where none are known.

    Args:
        routes: [T', L, k] of each row's first tokens; None: a row without routes.
        indices: [B, T], stream index of each token of each row.
    """
    present = [route for route in routes if route is not None]
    if not present:
        return None
    out = np.full((size, *present[0].shape[1:]), _UNKNOWN, np.int16)
    for route, index in zip(routes, indices, strict=True):
        if route is not None:
            out[index[: len(route)]] = route[: len(index)]
    return sent(torch.from_numpy(out), device)


def check_routes(batch: TrainBatch) -> None:
    """Raise ValueError for rows of the policy loss without routes."""
    trained = batch.policy.mask.any(dim=1).tolist()
    routes = batch.routes or [None] * len(trained)
    if missing := sum(route is None for route, is_trained in zip(routes, trained, strict=True) if is_trained):
        raise ValueError(
            f"policy.router_replay: {missing} of {sum(trained)} samples have no routes: their engine did not "
            "record them; start a new run"
        )
