"""Attention over packed rows by a kernel for rows of any lengths, torch's own or flash-attention's, on GPUs.

Flash-attention aligns causal masks to the ends of rows (github.com/Dao-AILab/flash-attention): with fewer
queries than keys, the last query sees all keys, the one before it all but the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from grpo_dist.policy.to_device import sent


@dataclass(frozen=True, slots=True)
class Segments:
    """Where a variable-length kernel finds each row's tokens, end to end: ``ends``, int32 [rows + 1], where
    each begins and the last ends; ``longest`` row.
    """

    ends: Int[Tensor, " E"]
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Segments:
        ends = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
        return cls(sent(ends, device), max(lengths))


# (q [N, H, D], k [L, H', D], v, segments of q, segments of k and v, scale, tokens to the left that a token
# sees or -1 for all, dropout) -> [N, H, D]. The last query of a row is at the place of its last key.
VarlenFunction = Callable[[Tensor, Tensor, Tensor, Segments, Segments, float, int, float], Tensor]


@dataclass(frozen=True, slots=True)
class VarlenSpans:
    """``own``: of each row, the tokens that no row before it has, which are queries where they lie.
    ``whole``: all of its tokens, keys and values; ``indices`` int64 [L] of these in the stream, None: the
    stream itself.

        stream   7 8 9 4 5 2 6 2        own    7 8 9 4 5 2 | 6 2
                                        whole  7 8 9 4 5 2 | 7 8 9 6 2
    """

    function: VarlenFunction
    own: Segments
    whole: Segments
    indices: Int[Tensor, " L"] | None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, dropout: float
    ) -> Tensor:
        if self.indices is not None:
            k, v = (_Repeated.apply(t, self.indices) for t in (k, v))
        left = -1 if window is None else window - 1
        return self.function(q, k, v, self.own, self.whole, scale, left, dropout)


class _Repeated(torch.autograd.Function):
    """``index_select`` of rows. Gradients are added up in float32 at least: many samples share a prompt."""

    @staticmethod
    def forward(ctx: Any, rows: Float[Tensor, "N H D"], indices: Int[Tensor, " L"]) -> Float[Tensor, "L H D"]:
        ctx.save_for_backward(indices)
        ctx.count = len(rows)
        return rows.index_select(0, indices)

    @staticmethod
    def backward(ctx: Any, grad: Float[Tensor, "L H D"]) -> tuple[Float[Tensor, "N H D"], None]:
        (indices,) = ctx.saved_tensors
        exact = torch.promote_types(grad.dtype, torch.float32)
        total = grad.new_zeros(ctx.count, *grad.shape[1:], dtype=exact)
        return total.index_add_(0, indices, grad.to(exact)).to(grad.dtype), None


class VarlenKernel:
    """Half precision on GPUs. ``function``: `torch_varlen` or `flash_varlen`; it needs no groups.

    What each row has alone lies behind that of the row before it, as `packed` lays rows out. A row of which
    others have all tokens has nothing to compute: these see the same tokens there.
    """

    def __init__(self, function: VarlenFunction) -> None:
        self._function = function

    def spans(
        self, rows: Sequence[np.ndarray], groups: Sequence[int], size: int, device: torch.device
    ) -> VarlenSpans:
        filler = np.arange(max(int(row[-1]) for row in rows) + 1, size)
        own: list[int] = []
        whole: list[np.ndarray] = []
        end = 0
        for row in sorted([*rows, *([filler] if len(filler) else [])], key=lambda row: int(row[-1])):
            if (new := int(row[-1]) + 1 - end) > 0:
                assert row[-new] == end, "a row's own tokens are its last ones, behind those of others"
                own.append(new)
                whole.append(row)
                end += new
        lengths = [len(row) for row in whole]
        repeats = sum(lengths) != size
        indices = sent(torch.from_numpy(np.concatenate(whole)), device) if repeats else None
        return VarlenSpans(self._function, Segments.of(own, device), Segments.of(lengths, device), indices)


def torch_varlen(
    q: Tensor, k: Tensor, v: Tensor, own: Segments, whole: Segments, scale: float, left: int, dropout: float
) -> Tensor:
    """Call torch's own kernel. Raises ValueError for dropout, which it does not support."""
    from torch.nn.attention.varlen import varlen_attn

    if dropout:
        raise ValueError(
            f"attention dropout {dropout}: set the model's attention_dropout to 0, or model.packing=false"
        )
    gqa = q.shape[1] != k.shape[1]
    out: Any = varlen_attn(
        q, k, v, own.ends, whole.ends, own.longest, whole.longest,
        scale=scale, window_size=(left, 0), enable_gqa=gqa,
    )  # fmt: skip
    return out


def flash_varlen(
    q: Tensor, k: Tensor, v: Tensor, own: Segments, whole: Segments, scale: float, left: int, dropout: float
) -> Tensor:
    """Call the flash-attn package's kernel."""
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(
        q, k, v, own.ends, whole.ends, own.longest, whole.longest,
        dropout_p=dropout, softmax_scale=scale, causal=True, window_size=(left, 0),
    )  # fmt: skip
