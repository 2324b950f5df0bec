"""Components of the algorithm by name, built-in or user-supplied. A result of user code must have the shape
that the run needs; masked tokens and unscored samples count for nothing in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_dist.algorithms.kl import KL_ESTIMATORS
from grpo_dist.algorithms.ratios import Stats, masked_inputs, ratio_stats
from grpo_dist.plugins.inputs import AdvantageInputs, AggregationInputs, KLInputs, PolicyLossInputs
from grpo_dist.plugins.user_code import (
    ADVANTAGE,
    AGGREGATION,
    KL,
    LOSS,
    Kind,
    UserComponent,
    call,
    failures_named,
    load,
)


@dataclass(frozen=True, slots=True)
class UserCode:
    """Where user-supplied components are found, and their arguments by kind."""

    code_paths: Sequence[str] = ()
    kwargs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def from_pieces(cls, code_paths: Sequence[str], components: Iterable[UserComponent]) -> UserCode:
        return cls(code_paths, {_KEYS[component.kind]: component.kwargs for component in components})


_KEYS = {ADVANTAGE: "advantage", LOSS: "policy_loss", KL: "kl", AGGREGATION: "aggregation"}


def user_advantages(name: str, user_code: UserCode, inputs: AdvantageInputs) -> Float[Tensor, " B"]:
    """Return float64 advantages; 0 where the reward is not finite. Raises ValueError for a wrong result."""
    advantages = _call_user_code(ADVANTAGE, name, user_code, inputs, "advantage").double()
    _check_shape(ADVANTAGE, name, advantages, inputs.rewards)
    advantages = torch.where(torch.isfinite(inputs.rewards), advantages, 0.0)
    if not torch.isfinite(advantages).all():
        raise ValueError(f"{ADVANTAGE.title} {name}: an advantage of a scored sample is not finite")
    return advantages


def user_policy_loss(
    name: str, user_code: UserCode, inputs: PolicyLossInputs
) -> tuple[Float[Tensor, "B T"], Stats]:
    """Return losses, 0 where masked, and statistics of the ratios. Raises ValueError for a wrong shape."""
    mask = inputs.mask
    log_ratio, advantages = masked_inputs(inputs.logprobs, inputs.old_logprobs, inputs.advantages, mask)
    safe = replace(
        inputs,
        logprobs=torch.where(mask, inputs.logprobs, 0.0),
        old_logprobs=torch.where(mask, inputs.old_logprobs, 0.0),
        rollout_logprobs=torch.where(mask, inputs.rollout_logprobs, 0.0),
        advantages=advantages,
    )
    losses = _call_user_code(LOSS, name, user_code, safe, "policy_loss")
    _check_shape(LOSS, name, losses, inputs.logprobs)
    return torch.where(mask, losses, 0.0), ratio_stats(log_ratio, mask)


def kl_estimate(
    name: str, user_code: UserCode, logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Return nats per token by a built-in or user-supplied estimator. Raises ValueError for a wrong shape."""
    if name in KL_ESTIMATORS:
        return KL_ESTIMATORS[name](logprobs, ref_logprobs)
    kl = _call_user_code(KL, name, user_code, KLInputs(logprobs, ref_logprobs), "kl")
    _check_shape(KL, name, kl, logprobs)
    return kl


def user_aggregation(name: str, user_code: UserCode, inputs: AggregationInputs) -> Float[Tensor, ""]:
    """Return the share of these rows in the loss. Raises ValueError for a result that is not a scalar."""
    losses = torch.where(inputs.mask, inputs.token_losses, 0.0)
    inputs = replace(inputs, token_losses=losses)
    loss = _call_user_code(AGGREGATION, name, user_code, inputs, "aggregation")
    _check_shape(AGGREGATION, name, loss, losses.sum())
    return loss


def _call_user_code(kind: Kind, name: str, user_code: UserCode, inputs: Any, key: str) -> Tensor:
    function = load(kind, name, user_code.code_paths)
    with failures_named(kind, name):
        result = call(function, inputs, user_code.kwargs.get(key, {}))
    if not isinstance(result, Tensor) or not result.is_floating_point():
        description = (
            f"a tensor of {result.dtype}" if isinstance(result, Tensor) else repr(type(result).__name__)
        )
        raise ValueError(f"{kind.title} {name} returned {description}; expected a tensor of floats")
    return result


def _check_shape(kind: Kind, name: str, result: Tensor, like: Tensor) -> None:
    if result.shape != like.shape:
        raise ValueError(
            f"{kind.title} {name} returned shape {list(result.shape)}; expected {list(like.shape)}"
        )
