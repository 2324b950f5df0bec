"""Long completions over several ranks: DeepSpeed-Ulysses (arXiv:2309.14509) for packed rows.

The ranks of a sequence group get the same rows. Each runs all token-wise operations on an equal slice of the
stream; for attention the slices are exchanged for heads, so that each rank sees all tokens of its share of
the heads, and back:

    rank 0   tokens 0 1, heads a b  --.-->  tokens 0 1 2 3, head a  -- attend --.-->  tokens 0 1, heads a b
    rank 1   tokens 2 3, heads a b  --'-->  tokens 0 1 2 3, head b  -- attend --'-->  tokens 2 3, heads a b

At the end every rank of the group gathers all log-probs, because losses over sequences need whole sequences.
Each rank computes the same loss; its gradient flows back into the rank's own slice only, and the sum over all
ranks is the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.distributed.nn.functional import all_to_all_single

from grpo_dist.policy.attention import Spans, packing_problem
from grpo_dist.policy.packing import Layout


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """This rank among the ``size`` ranks that share its rows."""

    group: Any  # torch.distributed's process group
    size: int
    index: int

    @classmethod
    def join(cls, size: int, timeout_s: float) -> SequenceGroup:
        """Join this rank's group; ranks 0 .. size - 1 are the first one. Collective over all ranks.

        ``timeout_s``: timeout of its collectives.
        """
        rank, world, timeout = dist.get_rank(), dist.get_world_size(), timedelta(seconds=timeout_s)
        members = [list(range(first, first + size)) for first in range(0, world, size)]
        groups = [dist.new_group(ranks, timeout=timeout) for ranks in members]
        return cls(groups[rank // size], size, rank % size)

    def own_slice(self, layout: Layout) -> tuple[Layout, Tensor]:
        """Return this rank's part of a packed ``layout`` whose stream divides evenly, and the indices, int64,
        of the wanted tokens that are predicted from it.
        """
        assert layout.positions is not None and layout.spans is not None, "padded rows cannot be shared"
        width = layout.tokens.shape[1] // self.size
        start = self.index * width
        indices = ((layout.sources >= start) & (layout.sources < start + width)).nonzero()[:, 0]
        part = replace(
            layout,
            tokens=layout.tokens[:, start : start + width],
            positions=layout.positions[:, start : start + width],
            spans=_UlyssesSpans(layout.spans, self),
            sources=layout.sources[indices] - start,
            targets=layout.targets[indices],
            temperature=_select_part(layout.temperature, indices),
            routes=None if layout.routes is None else layout.routes[start : start + width],
            candidates=None if layout.candidates is None else layout.candidates[indices],
            candidates_at_teacher=None,  # compared in the whole layout
            mask=None if layout.mask is None else layout.mask.select(indices),
        )
        return part, indices

    def together(self, values: Shaped[Tensor, "S ..."], index: Tensor, count: int) -> Shaped[Tensor, "M ..."]:
        """Return the values of all slices, ``count`` in all, on every rank. Collective."""
        placed = values.new_zeros(count, *values.shape[1:]).index_copy(0, index, values)
        return _SumOfParts.apply(placed, self.group)


def _select_part(temperature: float | Tensor | None, indices: Tensor) -> float | Tensor | None:
    return temperature[indices] if isinstance(temperature, Tensor) else temperature


def check_heads(model: Any, size: int) -> None:
    """Raise ValueError if ``size`` ranks cannot share the rows or the attention heads of ``model``
    (transformers).
    """
    if size > 1 and (problem := packing_problem(model)):
        raise ValueError(
            f"policy.sequence_parallel = {size} splits packed rows over ranks, and this model's rows are "
            f"padded ({problem}); use 1"
        )
    heads = model.config.get_text_config().num_attention_heads
    if heads % size:
        raise ValueError(
            f"policy.sequence_parallel = {size}: the model has {heads} attention heads, which {size} ranks "
            "cannot share equally; use a divisor of them"
        )


class _SumOfParts(torch.autograd.Function):
    """Sums the parts of all ranks, each 0 elsewhere, to the whole on every rank. The loss is the same on all
    ranks and counts once: a rank's part gets its gradient from that rank's loss.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        whole = part.clone()
        dist.all_reduce(whole, group=group)  # bounded: the process group has a deadline
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@dataclass(frozen=True, slots=True)
class _UlyssesSpans:
    inner: Spans
    ranks: SequenceGroup

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, dropout: float
    ) -> Tensor:
        """Attend for this rank's slice of the stream, see `Spans`. Collective over the sequence group."""
        if k.shape[1] % self.ranks.size:  # indivisible key heads: repeat them for each query head
            k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        q, k, v = (self._tokens_for_heads(t) for t in (q, k, v))
        out = self.inner.attend(q, k, v, scale=scale, window=window, dropout=dropout)
        return self._heads_for_tokens(out)

    def _tokens_for_heads(self, slice_: Float[Tensor, "n H D"]) -> Float[Tensor, "N h D"]:
        tokens, heads, size = slice_.shape
        by_rank = slice_.view(tokens, self.ranks.size, -1, size).transpose(0, 1)
        return self._exchange(by_rank).view(-1, heads // self.ranks.size, size)

    def _heads_for_tokens(self, share: Float[Tensor, "N h D"]) -> Float[Tensor, "n H D"]:
        _, heads, size = share.shape
        by_rank = share.reshape(self.ranks.size, -1, heads, size)
        return self._exchange(by_rank).transpose(0, 1).flatten(1, 2)

    def _exchange(self, by_rank: Float[Tensor, "R ..."]) -> Float[Tensor, "R ..."]:
        """Send part i to rank i of the group; return the parts received."""
        by_rank = by_rank.contiguous()
        return all_to_all_single(torch.empty_like(by_rank), by_rank, group=self.ranks.group)
