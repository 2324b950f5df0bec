"""Log-probs of given tokens from hidden states: the one place where logits are shifted, and where they exist
at all.

The result is indexed by the token it describes: entry t is log p(tokens[t] | tokens[< t]) and comes from the
hidden state at t - 1. Logits are made ``chunk_tokens`` rows at a time, in float32, and never kept: the
backward pass makes them again.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def token_logprobs(
    hidden: Float[Tensor, "B T D"],
    lm_head_weight: Float[Tensor, "V D"],
    tokens: Int[Tensor, "B T"],
    *,
    temperature: float,
    chunk_tokens: int,
    bias: Float[Tensor, " V"] | None = None,
    with_entropy: bool = False,
    mask: Bool[Tensor, "B T"] | None = None,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"] | None]:
    """Log-softmax of ``(hidden @ lm_head_weight.T + bias) / temperature`` at the next token.

    Args:
        hidden: last hidden states, of any floating type; logits and sums are float32.
        temperature: that of the sampling distribution; above 0.
        chunk_tokens: rows of logits [chunk_tokens, V] that exist at once.
        with_entropy: return the entropy of each distribution too, without gradient.
        mask: tokens whose log-prob is wanted; None: all but the first, which nothing predicts.

    Returns:
        Log-probs in nats, float32 [B, T], 0 where not wanted and at t = 0; entropies likewise, or None.
    """
    wanted = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    row, column = wanted[:, 1:].nonzero(as_tuple=True)
    values, entropies = _ChunkedLogprobs.apply(
        hidden[row, column],
        lm_head_weight,
        bias,
        tokens[row, column + 1],
        temperature,
        chunk_tokens,
        with_entropy,
    )
    logprobs = torch.zeros(tokens.shape, dtype=torch.float32, device=hidden.device).index_put(
        (row, column + 1), values
    )
    if not with_entropy:
        return logprobs, None
    entropy = torch.zeros_like(logprobs).index_put((row, column + 1), entropies)
    return logprobs, entropy.detach()


class _ChunkedLogprobs(torch.autograd.Function):
    """Rows [N, D] and targets [N] to log-probs and entropies [N]. With g the incoming gradient of a row,
    d logits = g (onehot(target) - softmax) / temperature."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(rows, weight, bias, targets)
        ctx.temperature, ctx.chunk = temperature, chunk
        values = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
        entropies = torch.zeros_like(values)
        for start in range(0, len(rows), chunk):
            part = slice(start, start + chunk)
            log_p = _log_softmax(rows[part], weight, bias, temperature)
            values[part] = log_p.gather(1, targets[part, None])[:, 0]
            if with_entropy:
                entropies[part] = -(log_p.exp() * log_p).sum(dim=1)
        ctx.mark_non_differentiable(entropies)
        return values, entropies

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, bias, targets = ctx.saved_tensors
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_rows = torch.empty_like(rows) if needs_rows else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        for start in range(0, len(rows), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits = _log_softmax(rows[part], weight, bias, ctx.temperature).exp_().neg_()
            logits.scatter_add_(1, targets[part, None], torch.ones_like(logits[:, :1]))
            logits.mul_((grad[part] / ctx.temperature)[:, None])
            if grad_rows is not None:
                grad_rows[part] = (logits.to(weight.dtype) @ weight).to(rows.dtype)
            if grad_weight is not None:
                grad_weight.addmm_(logits.T, rows[part].float())
            if grad_bias is not None:
                grad_bias += logits.sum(dim=0)
        return (
            grad_rows,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None, None, None, None,
        )  # fmt: skip


def _log_softmax(rows: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = torch.nn.functional.linear(rows, weight, bias).float()
    return torch.log_softmax(logits / temperature if temperature != 1.0 else logits, dim=1)
