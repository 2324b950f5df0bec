"""Log-probs and gradients of blocks of logits [N, V], with torch's operations; `logit_kernels` has the same
two functions for GPUs. Two blocks exist at once, including the logits; three with a cap after the head.

With p the softmax of a row at its temperature, H its entropy, g, h the incoming gradients of its log-prob and
its entropy, and s the sum of the gradients of all its log-probs (g and the candidates'),
d logits = (g onehot(target) - s p - h p (log p + H)) / temperature, plus a candidate's gradient at its token.
The gradient of the LM head's outputs is d logits times the derivative of the `LogitTransform` after the head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from grpo_dist.runtime.logit_transform import IDENTITY, LogitTransform


@dataclass(frozen=True, slots=True)
class RowSums:
    """Values per row for the backward pass: ``entropies``, the ``largest`` logit at the temperature, and
    ``logarithms``, log of the sum of exp(logit - largest). Adding the last two would lose digits.
    """

    entropies: Float[Tensor, " N"]
    largest: Float[Tensor, " N"]
    logarithms: Float[Tensor, " N"]

    def __getitem__(self, part: slice) -> RowSums:
        return RowSums(*(t[part] for t in self.tensors))

    def __setitem__(self, part: slice, sums: RowSums) -> None:
        for t, other in zip(self.tensors, sums.tensors, strict=True):
            t[part] = other

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.entropies, self.largest, self.logarithms

    @classmethod
    def empty_like(cls, values: Tensor) -> RowSums:
        return cls(*(torch.empty_like(values) for _ in range(3)))


def logprobs(
    logits: Float[Tensor, "N V"],
    targets: Int[Tensor, " N"],
    temperature: float | int | Float[Tensor, " N"],
    *,
    with_entropy: bool,
) -> tuple[Float[Tensor, " N"], RowSums]:
    """Return the log-softmax of ``logits / temperature`` at ``targets``, and the sums of the rows; without
    ``with_entropy`` the entropies may be 0. ``logits`` are overwritten; ``temperature`` is one number, or one
    per row.
    """
    logits = _scaled(logits, temperature)
    largest = logits.amax(dim=1, keepdim=True)
    logits -= largest
    logarithms = logits.exp().sum(dim=1, keepdim=True).log()
    logits -= logarithms
    values = logits.gather(1, targets[:, None])[:, 0]
    entropies = torch.zeros_like(values)
    if with_entropy:
        entropies = torch.special.entr(logits.exp_()).sum(dim=1)
    return values, RowSums(entropies, largest[:, 0], logarithms[:, 0])


def gradient(
    logits: Float[Tensor, "N V"],
    targets: Int[Tensor, " N"],
    temperature: float | int | Float[Tensor, " N"],
    sums: RowSums,
    grad: Float[Tensor, " N"] | None,
    entropy_grad: Float[Tensor, " N"] | None,
    dtype: torch.dtype,
    total: Float[Tensor, " N"] | None = None,
    transform: LogitTransform = IDENTITY,
) -> Float[Tensor, "N V"]:
    """Return the gradient of the LM head's outputs that ``transform`` has turned into ``logits``, in
    ``dtype``. ``logits`` are overwritten.

    Args:
        grad, entropy_grad: gradients of the log-probs and of the entropies; None: 0.
        total: sum of the gradients of all log-probs of a row; None: ``grad``. The result at candidate tokens
            lacks the candidates' gradients; the caller replaces it.
    """
    slopes = transform.derivative(logits)
    logits = _scaled(logits, temperature)
    logits -= sums.largest[:, None]
    logits -= sums.logarithms[:, None]
    grad = torch.zeros_like(sums.largest) if grad is None else grad / temperature
    total = grad if total is None else total / temperature
    out = logits.exp()
    if entropy_grad is None:
        out *= -total[:, None]
    else:
        logits += sums.entropies[:, None]
        logits *= -(entropy_grad / temperature)[:, None]
        logits -= total[:, None]
        out *= logits
    out.scatter_add_(1, targets[:, None], grad[:, None].to(out.dtype))
    if not transform.is_identity:
        out *= slopes
    return out.to(dtype)


def _scaled(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """Divide ``logits`` in place."""
    if isinstance(temperature, Tensor):
        return logits.div_(temperature[:, None])
    return logits.div_(temperature) if temperature != 1.0 else logits
