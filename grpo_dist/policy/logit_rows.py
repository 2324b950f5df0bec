"""What is computed from blocks of logits [N, V], by torch's operations; `logit_kernels` does it on GPUs.

With p the softmax of a row at its temperature, H its entropy, and g, h the incoming gradients of its log-prob
and its entropy, d logits = (g (onehot(target) - p) - h p (log p + H)) / temperature.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowResults:
    """Of each row: ``values``: log-prob of its target; ``entropies``: of its distribution; ``largest``: logit
    at the temperature; ``logarithms``: of the sum of exponentials of what all logits are below the largest.
    The sum of the last two would be rounded to the digits of the larger.
    """

    values: Float[Tensor, " N"]
    entropies: Float[Tensor, " N"]
    largest: Float[Tensor, " N"]
    logarithms: Float[Tensor, " N"]

    def __getitem__(self, part: slice) -> RowResults:
        return RowResults(*(t[part] for t in self.tensors))

    def __setitem__(self, part: slice, own: RowResults) -> None:
        for t, other in zip(self.tensors, own.tensors, strict=True):
            t[part] = other

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.values, self.entropies, self.largest, self.logarithms

    @classmethod
    def empty(cls, rows: int, dtype: torch.dtype, device: torch.device) -> RowResults:
        return cls(*(torch.empty(rows, dtype=dtype, device=device) for _ in range(4)))


@runtime_checkable
class LogitRows(Protocol):
    """``logits`` [N, V] are overwritten; ``temperature`` is a number, or one [N] for each row."""

    def results(
        self, logits: Tensor, targets: Tensor, temperature: float | Tensor, *, with_entropy: bool
    ) -> RowResults: ...

    def gradient(
        self,
        logits: Tensor,
        targets: Tensor,
        temperature: float | Tensor,
        own: RowResults,
        grad: Tensor | None,
        entropy_grad: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return the gradient of ``logits`` [N, V] in ``dtype``. ``own``: the results of the same rows.
        ``grad``, ``entropy_grad`` [N]: of their values and entropies; None: 0.
        """
        ...


class TorchLogitRows:
    """Two blocks [N, V] exist at once, the logits among them; three with an ``entropy_grad``."""

    def results(
        self,
        logits: Float[Tensor, "N V"],
        targets: Int[Tensor, " N"],
        temperature: float | int | Float[Tensor, " N"],
        *,
        with_entropy: bool,
    ) -> RowResults:
        logits = _cooled(logits, temperature)
        largest = logits.amax(dim=1, keepdim=True)
        logits -= largest
        logarithms = logits.exp().sum(dim=1, keepdim=True).log()
        logits -= logarithms
        values = logits.gather(1, targets[:, None])[:, 0]
        entropies = torch.zeros_like(values)
        if with_entropy:
            entropies = torch.special.entr(logits.exp_()).sum(dim=1)
        return RowResults(values, entropies, largest[:, 0], logarithms[:, 0])

    def gradient(
        self,
        logits: Float[Tensor, "N V"],
        targets: Int[Tensor, " N"],
        temperature: float | int | Float[Tensor, " N"],
        own: RowResults,
        grad: Float[Tensor, " N"] | None,
        entropy_grad: Float[Tensor, " N"] | None,
        dtype: torch.dtype,
    ) -> Float[Tensor, "N V"]:
        logits = _cooled(logits, temperature)
        logits -= own.largest[:, None]
        logits -= own.logarithms[:, None]
        grad = torch.zeros_like(own.values) if grad is None else grad / temperature
        out = logits.exp()
        if entropy_grad is None:
            out *= -grad[:, None]
        else:
            logits += own.entropies[:, None]
            logits *= -(entropy_grad / temperature)[:, None]
            logits -= grad[:, None]
            out *= logits
        return out.scatter_add_(1, targets[:, None], grad[:, None].to(out.dtype)).to(dtype)


def _cooled(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """Divide ``logits`` in place."""
    if isinstance(temperature, Tensor):
        return logits.div_(temperature[:, None])
    return logits.div_(temperature) if temperature != 1.0 else logits


def rows_for(values: Tensor) -> LogitRows:
    """Return what computes rows on the device of ``values``, which have the type of the logits."""
    if values.is_cuda and values.dtype == torch.float32:
        from grpo_dist.policy.logit_kernels import KernelLogitRows  # Triton, which CPUs do not need

        return KernelLogitRows()
    return TorchLogitRows()
