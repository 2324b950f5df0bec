"""Tries every own piece before a run, on a small made input of the right shapes: a mistake costs seconds.

Rewards are tried by `rewards.registry.reward_problems`, environments by `data.tasks`, and data sources by
reading them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from threading import Thread
from typing import Any

import numpy as np
import torch

from grpo_dist.config.secrets import masked_text
from grpo_dist.data.order import chosen
from grpo_dist.environments.episode import Generation
from grpo_dist.environments.user_rollout import UserRollout
from grpo_dist.errors import raised
from grpo_dist.loop.metrics import own_metric
from grpo_dist.plugins.algorithm import (
    UserCode,
    kl_estimate,
    user_advantages,
    user_aggregation,
    user_policy_loss,
)
from grpo_dist.plugins.inputs import (
    AdvantageInputs,
    AggregationInputs,
    KLInputs,
    MetricInputs,
    OrderInputs,
    PolicyLossInputs,
    RolloutInputs,
    SinkInputs,
)
from grpo_dist.plugins.user_code import (
    ADVANTAGE,
    AGGREGATION,
    KL,
    LOSS,
    METRIC,
    ORDER,
    ROLLOUT,
    SINK,
    Kind,
    UserCodeFailed,
    UserComponent,
    check_signature,
    load,
)
from grpo_dist.types import Group, Prompt, Rollout, Sampling

TRIAL_S = 60.0  # deadline of one piece, with its imports
_ROWS, _TOKENS, _CLOSE = 4, 6, 1e-4
_INPUTS: dict[Kind, type[Any]] = {
    ADVANTAGE: AdvantageInputs, LOSS: PolicyLossInputs, KL: KLInputs, AGGREGATION: AggregationInputs,
    METRIC: MetricInputs, SINK: SinkInputs, ORDER: OrderInputs, ROLLOUT: RolloutInputs,
}  # fmt: skip


def user_code_problems(
    pieces: Sequence[UserComponent], code_paths: Sequence[str], tokenizer: Any = None
) -> Iterator[str]:
    """Yield a message for every piece that cannot be used. Imports and runs user code.

    ``tokenizer``: of the model, for a rollout function; None: that is not called.
    """
    for piece in pieces:
        if piece.kind not in _INPUTS:
            continue
        error = _failure(lambda piece=piece: _try(piece, code_paths, tokenizer))  # type: ignore[misc]
        if isinstance(error, UserCodeFailed):
            error = error.__cause__
        elif isinstance(error, ValueError):
            yield f"`{piece.key}` = {piece.name}: {error}"
            continue
        # Names of the run's rewards, metrics and columns are not those of a made input. Losses see none.
        is_name = isinstance(error, KeyError) and piece.kind not in (LOSS, KL, AGGREGATION)
        if error is not None and not is_name:
            reason = masked_text(raised(error))
            yield f"`{piece.key}` = {piece.name} fails on a small made input ({reason}); correct it"


def _failure(trial: Callable[[], None]) -> BaseException | None:
    """Return what ``trial`` raises; a ValueError where it takes longer than `TRIAL_S`."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            trial()
        except BaseException as error:  # sys.exit of a user's code, too: it is reported, not obeyed
            errors.append(error)

    thread = Thread(target=run, name="trial of own code", daemon=True)
    thread.start()
    thread.join(TRIAL_S)
    if thread.is_alive():
        return ValueError(f"it did not return within {TRIAL_S:g} s on a small made input; correct it")
    return errors[0] if errors else None


def _try(piece: UserComponent, code_paths: Sequence[str], tokenizer: Any) -> None:
    """Call ``piece`` on a made input. Raises whatever is wrong with it."""
    kind, name = piece.kind, piece.name
    function = load(kind, name, code_paths)
    in_list = kind in (METRIC, SINK)
    arguments = "rollout.function_kwargs" if kind is ROLLOUT else f"{piece.key}{'.N' * in_list}.kwargs"
    check_signature(function, _INPUTS[kind], piece.kwargs, f"{kind.title} {name}", arguments)
    if kind in (ADVANTAGE, LOSS, KL, AGGREGATION):
        _TRIALS[kind](name, UserCode.from_pieces(code_paths, [piece]))
    elif kind is METRIC:
        inputs = MetricInputs(1, _made_groups(), {"reward/mean": 0.5})
        own_metric(name, code_paths, piece.kwargs, inputs, "trial")
    elif kind is SINK:
        if absent := [method for method in ("log", "table", "close") if not hasattr(function, method)]:
            raise ValueError(f"sink {name} has no method `{absent[0]}`; expected log, table and close")
    elif kind is ORDER:
        inputs_of_order = OrderInputs(1, 2, [_made_prompt(i) for i in range(6)], {"p0": (1.0, 4.0)}, 0)
        first = chosen(name, code_paths, piece.kwargs, inputs_of_order)
        if chosen(name, code_paths, piece.kwargs, inputs_of_order) != first:
            raise ValueError(f"prompt order {name} gives two answers to the same inputs; draw from `seed`")
    elif kind is ROLLOUT and tokenizer is not None:
        _try_rollout(UserRollout(name, function, piece.kwargs), tokenizer)


def _try_advantage(name: str, code: UserCode) -> None:
    rewards = torch.tensor([1.0, 0.0, 0.5, torch.nan, 2.0, 2.0, 2.0, 2.0], dtype=torch.float64)
    parts = {"trial": torch.nan_to_num(rewards)}
    inputs = AdvantageInputs(
        rewards, torch.arange(8) // 4, torch.arange(1, 9), torch.arange(8) == 7, parts, {"trial": 1.0}
    )
    user_advantages(name, code, inputs)


def _try_loss(name: str, code: UserCode) -> None:
    values = _made_values()
    logprobs = values[0].requires_grad_()
    inputs = PolicyLossInputs(logprobs, values[1], values[2], torch.sin(values[1] * 9), _mask())
    losses, _ = user_policy_loss(name, code, inputs)
    _check_gradient(f"{LOSS.title} {name}", losses, logprobs)
    halves = [
        user_policy_loss(name, code, PolicyLossInputs(
            logprobs[half], inputs.old_logprobs[half], inputs.rollout_logprobs[half], inputs.advantages[half],
            inputs.mask[half],
        ))[0]
        for half in (slice(0, 2), slice(2, None))
    ]  # fmt: skip
    _check_split(f"{LOSS.title} {name}", losses, torch.cat(halves))


def _try_kl(name: str, code: UserCode) -> None:
    values = _made_values()
    logprobs = values[0].requires_grad_()
    kl = kl_estimate(name, code, logprobs, values[1])
    _check_gradient(f"{KL.title} {name}", kl, logprobs)
    halves = [
        kl_estimate(name, code, logprobs[:2], values[1][:2]),
        kl_estimate(name, code, logprobs[2:], values[1][2:]),
    ]
    _check_split(f"{KL.title} {name}", kl, torch.cat(halves))


def _try_aggregation(name: str, code: UserCode) -> None:
    losses, mask = _made_values()[0].requires_grad_(), _mask()

    def share(rows: slice) -> torch.Tensor:
        of_samples, of_prompts = mask.sum(dim=1), mask.sum().expand(len(mask))  # all of one prompt
        inputs = AggregationInputs(
            losses[rows], mask[rows], float(mask.sum()), 4.0, 8, of_samples[rows], 1.0, of_prompts[rows]
        )
        return user_aggregation(name, code, inputs)

    whole = share(slice(None))
    _check_gradient(f"{AGGREGATION.title} {name}", whole, losses)
    _check_split(f"{AGGREGATION.title} {name}", whole, share(slice(0, 1)) + share(slice(1, None)))


def _check_gradient(what: str, result: torch.Tensor, of: torch.Tensor) -> None:
    if not result.requires_grad:
        raise ValueError(f"{what} has no gradient; do not detach or convert its inputs")
    (gradient,) = torch.autograd.grad(result.sum(), of, retain_graph=True)
    if not (torch.isfinite(gradient).all() and torch.isfinite(result).all()):
        raise ValueError(f"{what} is not finite, or its gradient is not")


def _check_split(what: str, whole: torch.Tensor, parts: torch.Tensor) -> None:
    if not torch.allclose(whole, parts, rtol=_CLOSE, atol=_CLOSE):
        raise ValueError(
            f"{what} gives other results when the rows are split, so the gradient would depend on the "
            "number of ranks; compute each row alone, and divide by the numbers that are given"
        )


def _try_rollout(rollout: UserRollout, tokenizer: Any) -> None:
    async def generate(
        ids: list[int], seed: int, sampling: Sampling, most: int, *, stop: Sequence[str]
    ) -> Generation:
        count = min(most, 3)
        return Generation(
            [ids[-1]] * count, np.full(count, -1.0, np.float32), np.zeros(count, np.int32), "stop"
        )

    asyncio.run(rollout.sample(_made_prompt(0), 0, 1, Sampling(max_new_tokens=64), generate, tokenizer))


_TRIALS: dict[Kind, Callable[[str, UserCode], None]] = {
    ADVANTAGE: _try_advantage, LOSS: _try_loss, KL: _try_kl, AGGREGATION: _try_aggregation,
}  # fmt: skip


def _made_values() -> list[torch.Tensor]:
    """Return three [4, 6] arrays of log-probs, nats, a little apart."""
    numbers = torch.arange(_ROWS * _TOKENS, dtype=torch.float32).view(_ROWS, _TOKENS)
    return [-0.5 - torch.sin(numbers + shift).abs() for shift in (0.0, 0.05, 0.1)]


def _mask() -> torch.Tensor:
    return torch.arange(_TOKENS) < torch.tensor([[6], [3], [5], [1]])


def _made_prompt(number: int) -> Prompt:
    return Prompt(f"p{number}", np.array([1, 2, 3], np.int32), "3", "made", "1+2=")


def _made_groups() -> list[Group]:
    rewards = np.array([1.0, 0.0], np.float32)
    rollouts = tuple(
        Rollout(
            "p0", i, np.full(i + 1, 3, np.int32), np.full(i + 1, -1.0, np.float32), "stop", "3",
            np.zeros(i + 1, np.int32), temperature=1.0, max_new_tokens=8,
        )
        for i in range(2)
    )  # fmt: skip
    return [Group(_made_prompt(0), rollouts, rewards, {"math": rewards}, ("correct", "wrong"))]
