"""Log-probs of given tokens from hidden states: the only place where logits exist.

The result is indexed by the token it describes: entry t is log p(tokens[t] | tokens[< t]) and comes from the
hidden state at t - 1; `layout` does that shift. Logits are made ``chunk_tokens`` rows at a time, in float32,
and never kept: the backward pass recomputes them. `logit_rows` computes on one block of them. At most two
blocks of [chunk_tokens, V] exist at once, plus a boolean block with sampling masks, and blocks of
[chunk_tokens, K] for the log-probs of K candidates.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from grpo_dist.policy import logit_rows
from grpo_dist.policy.logit_mask import LogitMask
from grpo_dist.policy.logit_rows import RowSums
from grpo_dist.policy.packing import padded
from grpo_dist.runtime.logit_transform import IDENTITY, LogitTransform


def token_logprobs(
    hidden: Float[Tensor, "B T D"],
    lm_head_weight: Float[Tensor, "V D"],
    tokens: Int[Tensor, "B T"],
    *,
    temperature: float | int,
    chunk_tokens: int,
    bias: Float[Tensor, " V"] | None = None,
    transform: LogitTransform = IDENTITY,
    with_entropy: bool = False,
    mask: Bool[Tensor, "B T"] | None = None,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"] | None]:
    """Return the log-softmax of ``transform(hidden @ lm_head_weight.T + bias) / temperature`` at the next
    token.

    Args:
        hidden: last hidden states, of any floating type. Logits, sums and the gradient of the weight are
            float32 for half precision too (float64 where ``hidden`` is).
        temperature: sampling temperature; above 0.
        chunk_tokens: rows of logits [chunk_tokens, V] made at once, at least 1.
        transform: the model's transform of logits after the LM head.
        with_entropy: return the entropy of each distribution too.
        mask: tokens whose log-prob is wanted; None: all but the first, which nothing predicts. Values of
            ``hidden`` and ``tokens`` for other tokens are ignored.

    Returns:
        Log-probs in nats, float32 [B, T], 0 where not wanted and at t = 0; entropies likewise, or None. Both
        are float64 where ``hidden`` is.
    """
    layout = padded(tokens, torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask)
    values, entropies, _ = selected_logprobs(
        hidden.flatten(0, 1)[layout.sources],
        lm_head_weight,
        layout.targets,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        bias=bias,
        transform=transform,
        with_entropy=with_entropy,
    )
    return layout.unpack_rows(values), None if entropies is None else layout.unpack_rows(entropies)


def selected_logprobs(
    rows: Float[Tensor, "M D"],
    lm_head_weight: Float[Tensor, "V D"],
    targets: Int[Tensor, " M"],
    candidates: Int[Tensor, "M K"] | None = None,
    *,
    temperature: float | int | Float[Tensor, " M"],
    chunk_tokens: int,
    bias: Float[Tensor, " V"] | None = None,
    transform: LogitTransform = IDENTITY,
    with_entropy: bool = False,
    mask: LogitMask | None = None,
) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"] | None, Float[Tensor, "M K"] | None]:
    """Do as `token_logprobs`, for hidden states and the tokens they predict; ``temperature`` may be per
    token. Also return the log-probs of ``candidates``, int64, at each token, with gradients; None without
    any. With a ``mask`` the softmax and its entropy are over the kept tokens only.
    """
    assert candidates is None or mask is None, "the mask may drop a teacher's likeliest tokens"
    values, entropies, candidate_logprobs = _ChunkedLogprobs.apply(
        rows, lm_head_weight, bias, targets, candidates, temperature, chunk_tokens, with_entropy, transform,
        mask,
    )  # fmt: skip
    return values, entropies if with_entropy else None, candidate_logprobs


@torch.no_grad()
def top_logprobs(
    rows: Float[Tensor, "M D"],
    lm_head_weight: Float[Tensor, "V D"],
    targets: Int[Tensor, " M"],
    count: int,
    *,
    vocabulary: int | None = None,
    temperature: float | int | Float[Tensor, " M"],
    chunk_tokens: int,
    bias: Float[Tensor, " V"] | None = None,
    transform: LogitTransform = IDENTITY,
) -> tuple[Float[Tensor, " M"], Int[Tensor, "M K"], Float[Tensor, "M K"]]:
    """Return the log-probs of ``targets``, and at each position the ``count`` likeliest tokens, int32,
    likeliest first, and their log-probs. Without gradients.

    Args:
        vocabulary: return only tokens below this as likeliest; None: all. Log-probs are always over the full
            distribution.
    """
    head = _Head(rows, lm_head_weight, bias, transform)
    values = torch.empty(len(rows), dtype=head.dtype, device=rows.device)
    top = values.new_empty(len(rows), count)
    ids, kernel = torch.empty_like(top, dtype=torch.int32), choose_logit_rows(values)
    for part in _parts(len(rows), chunk_tokens):
        logits, row_temperature = head.logits(rows[part]), _select(temperature, part)
        raw, ids[part] = logits[:, :vocabulary].topk(count, dim=1)
        values[part], sums = kernel.logprobs(logits, targets[part], row_temperature, with_entropy=False)
        top[part] = _normalise(raw, row_temperature, sums)
        del logits, raw  # before the next block is made
    return values, ids, top


@torch.no_grad()
def selected_score_norms(
    rows: Float[Tensor, "M D"], lm_head_weight: Float[Tensor, "V D"], targets: Int[Tensor, " M"], *,
    temperature: float | int | Float[Tensor, " M"], chunk_tokens: int,
    bias: Float[Tensor, " V"] | None = None, transform: LogitTransform = IDENTITY,
    mask: LogitMask | None = None,
) -> Float[Tensor, " M"]:  # fmt: skip
    """Return the squared norm of the gradient of log p(target) by the logits at ``temperature``:
    |onehot(target) - p|^2 = 1 - 2 p(target) + sum of p^2, in [0, 2], without a gradient.

    The logit-gradient proxy of the optimal token baseline (arXiv:2602.07078). Arguments as for
    `selected_logprobs`; one block of [chunk_tokens, V] exists at once.
    """
    head = _Head(rows, lm_head_weight, bias, transform)
    norms = torch.empty(len(rows), dtype=head.dtype, device=rows.device)
    for part in _parts(len(rows), chunk_tokens):
        row_temperature = _select(temperature, part)
        p = head.logits(rows[part])
        if mask is not None:
            p.masked_fill_(mask.dropped(part, p.shape[1]), -torch.inf)
        p /= row_temperature[:, None] if isinstance(row_temperature, Tensor) else row_temperature
        p -= p.amax(dim=1, keepdim=True)
        p.exp_()
        p /= p.sum(dim=1, keepdim=True)
        # 1 - p of the target as the sum of the other probabilities keeps its digits where p is nearly 1.
        p.scatter_(1, targets[part, None], 0.0)
        norms[part] = p.sum(dim=1).square() + torch.linalg.vecdot(p, p)
        del p  # before the next block is made
    return norms


def _normalise(logits: Tensor, temperature: float | Tensor, sums: RowSums) -> Tensor:
    """Return log-probs of ``logits`` [N, K], which are some of each row's."""
    return _divide(logits, temperature) - sums.largest[:, None] - sums.logarithms[:, None]


def _divide(values: Tensor, temperature: float | Tensor) -> Tensor:
    return values / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)


def _select(temperature: float | Tensor, part: slice) -> float | Tensor:
    """Return the temperature of the rows in ``part``, float32 [n] if there is one per row."""
    return temperature[part].float() if isinstance(temperature, Tensor) else float(temperature)


def choose_logit_rows(values: Tensor) -> Any:
    """Return the module that computes rows on the device of ``values``, which have the type of the logits."""
    if values.is_cuda and values.dtype == torch.float32:
        from grpo_dist.policy import logit_kernels  # Triton, which CPUs do not need

        return logit_kernels
    return logit_rows


class _ChunkedLogprobs(torch.autograd.Function):
    """Rows [N, D] and targets [N] to log-probs and entropies [N]; and candidates [N, K] to log-probs."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        candidates: Tensor | None,
        temperature: float | Tensor,
        chunk: int,
        with_entropy: bool,
        transform: LogitTransform,
        mask: LogitMask | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        head = _Head(rows, weight, bias, transform)
        values = torch.empty(len(rows), dtype=head.dtype, device=rows.device)
        candidate_logprobs = None if candidates is None else values.new_empty(candidates.shape)
        sums, kernel = RowSums.empty_like(values), choose_logit_rows(values)
        for part in _parts(len(rows), chunk):
            logits, row_temperature = head.logits(rows[part]), _select(temperature, part)
            if mask is not None:
                logits.masked_fill_(mask.dropped(part, logits.shape[1]), -torch.inf)
            raw = None if candidates is None else logits.gather(1, candidates[part])
            values[part], sums[part] = kernel.logprobs(
                logits, targets[part], row_temperature, with_entropy=with_entropy
            )
            if raw is not None and candidate_logprobs is not None:
                candidate_logprobs[part] = _normalise(raw, row_temperature, sums[part])
            del logits  # before the next block is made
        ctx.save_for_backward(rows, weight, bias, targets, candidates, candidate_logprobs, *sums.tensors)
        ctx.temperature, ctx.chunk, ctx.transform, ctx.mask = temperature, chunk, transform, mask
        ctx.set_materialize_grads(False)
        return values, sums.entropies, candidate_logprobs

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor | None, entropy_grad: Tensor | None, candidate_grad: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        rows, weight, bias, targets, candidates, candidate_logprobs, *row_sums = ctx.saved_tensors
        sums = RowSums(*row_sums)
        total = None
        if candidate_grad is not None:
            total = candidate_grad.sum(dim=1) if grad is None else candidate_grad.sum(dim=1) + grad
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        transform: LogitTransform = ctx.transform
        head, kernel = _Head(rows, weight, bias, transform), choose_logit_rows(sums.largest)
        grad_rows = torch.empty_like(rows) if needs_rows else None
        grad_weight = torch.zeros_like(weight, dtype=head.dtype) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=head.dtype) if needs_bias else None
        for part in _parts(len(rows), ctx.chunk):
            row_temperature = _select(ctx.temperature, part)
            logits = head.logits(rows[part])
            slopes = None if total is None else transform.derivative(logits.gather(1, candidates[part]))
            d_outputs = kernel.gradient(
                logits, targets[part], row_temperature, sums[part], _slice(grad, part),
                _slice(entropy_grad, part), head.operand_dtype, _slice(total, part), transform,
            )  # fmt: skip
            del logits
            if total is not None and candidate_grad is not None:
                exact = candidate_grad[part] - total[part, None] * candidate_logprobs[part].exp()
                if grad is not None:
                    exact += torch.where(candidates[part] == targets[part, None], grad[part, None], 0.0)
                if entropy_grad is not None:
                    part_logprobs = candidate_logprobs[part]
                    inner = torch.where(
                        part_logprobs > -torch.inf, part_logprobs + sums.entropies[part, None], 0.0
                    )
                    exact -= entropy_grad[part, None] * part_logprobs.exp() * inner
                exact *= slopes
                d_outputs.scatter_(1, candidates[part], _divide(exact, row_temperature).to(d_outputs.dtype))
            if ctx.mask is not None:
                d_outputs.masked_fill_(ctx.mask.dropped(part, d_outputs.shape[1]), 0.0)
            if grad_bias is not None:
                grad_bias += d_outputs.sum(dim=0, dtype=head.dtype)
            if grad_rows is not None:
                grad_rows[part] = head.product(d_outputs, head.weight)
            if grad_weight is not None:
                head.add_product(grad_weight, d_outputs.T, rows[part])
            del d_outputs  # before the next block is made
        return (
            grad_rows,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None, None, None, None, None, None, None,
        )  # fmt: skip


class _Head:
    """The LM head's products in float32 (float64 for float64) for any operand dtype, and the model's
    transform to logits.

    bfloat16 logits would carry an error of 2^-9 of their size, hundreds of times the difference between two
    correct engines. On CUDA bfloat16 operands go to the tensor cores as they are, with sums and results in
    float32; only the gradient of the products is rounded to bfloat16 there, also for the gradient of the
    bias. Elsewhere operands are widened.
    """

    def __init__(self, rows: Tensor, weight: Tensor, bias: Tensor | None, transform: LogitTransform) -> None:
        self.dtype = torch.promote_types(rows.dtype, torch.float32)
        self._tensor_cores = rows.is_cuda and rows.dtype == weight.dtype == torch.bfloat16
        self._operand = weight.dtype if self._tensor_cores else self.dtype
        self.weight = self.operand(weight)
        self._bias, self._transform = bias, transform

    @property
    def operand_dtype(self) -> torch.dtype:
        """Dtype of the operands of products."""
        return self._operand

    def logits(self, rows: Tensor) -> Tensor:
        out = self.product(rows, self.weight.T)
        if self._bias is not None:
            out += self._bias
        return self._transform.apply_(out)

    def operand(self, t: Tensor) -> Tensor:
        """Return ``t`` in the `operand_dtype`."""
        return t.to(self._operand)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = self.operand(a), self.operand(b)
        return torch.mm(a, b, out_dtype=self.dtype) if self._tensor_cores else torch.mm(a, b)

    def add_product(self, out: Tensor, a: Tensor, b: Tensor) -> None:
        """Add a b to ``out``, without a second tensor of its size."""
        a, b = self.operand(a), self.operand(b)
        if self._tensor_cores:
            torch.addmm(out, a, b, out_dtype=self.dtype, out=out)
        else:
            out.addmm_(a, b)


def _slice(values: Tensor | None, part: slice) -> Tensor | None:
    return None if values is None else values[part]


def _parts(count: int, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, count, chunk)]
