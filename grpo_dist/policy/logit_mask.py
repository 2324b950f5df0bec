"""Sampling masks in the trainer's softmax: Keep Sampling Mask (DeepSeek-V3.2, arXiv:2512.02556, section 3.1).

With top_p, top_k or min_p an engine samples token a from the kept set S, with the distribution

    q(a | S) = exp(z(a) / T) / sum over S of exp(z(j) / T)

The trainer uses the engine's S in every pass over the token: old log-probs, each epoch, the reference. Other
logits are -inf before the softmax and have gradient 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

from grpo_dist.runtime.hardware import sent
from grpo_dist.types import KeptTokens, Rows


@dataclass(frozen=True, slots=True)
class LogitMask:
    """The kept tokens of M rows of logits, on their device.

    Attributes:
        kept: the same in host memory.
        ends: int64 [2, M + 1], numbers of ids, and of rows with bits, before each row and in total.
    """

    kept: KeptTokens
    ends: np.ndarray
    is_restricted: Bool[Tensor, " M"]
    ids: Int[Tensor, " I"]  # int32
    id_rows: Int[Tensor, " I"]  # int32, the row of each
    bits: UInt8[Tensor, "W b"]
    bit_rows: Int[Tensor, " W"]  # int64

    @classmethod
    def from_rows(cls, rows: Rows, wanted: Bool[Tensor, "B T"], device: torch.device) -> LogitMask:
        """Return the masks of the ``wanted`` tokens of ``rows``, in order; never of a row's first token."""
        assert rows.kept is not None, "rows without masks need no mask"
        parts = []
        for kept, length, columns in zip(rows.kept, rows.lengths.tolist(), wanted.numpy(), strict=True):
            at = np.flatnonzero(columns[1:]) + 1
            parts.append((None if kept is None else kept.select(at - (length - len(kept.counts))), len(at)))
        joined = KeptTokens.join(parts)
        assert joined is not None, "a row has masks"
        return cls.from_kept(joined, device)

    @classmethod
    def from_kept(cls, kept: KeptTokens, device: torch.device) -> LogitMask:
        listed, numbers = kept.are_listed, np.arange(len(kept.counts))
        sizes = np.where(listed, kept.counts, 0)
        ends = np.cumsum(np.stack([sizes, ~listed]), axis=1, dtype=np.int64)
        id_rows = np.repeat(numbers.astype(np.int32), sizes)
        on_host = kept.counts > 0, kept.ids, id_rows, kept.bits, numbers[~listed]
        arrays = (sent(torch.from_numpy(np.array(values)), device) for values in on_host)
        return cls(kept, np.pad(ends, ((0, 0), (1, 0))), *arrays)

    def select(self, at: Int[Tensor, " N"]) -> LogitMask:
        """Return the masks of the rows ``at``."""
        return self.from_kept(self.kept.select(at.cpu().numpy()), self.ids.device)

    def dropped(self, part: slice, vocabulary: int) -> Bool[Tensor, "N V"]:
        """Return which tokens of the ``vocabulary`` the rows of ``part`` do not keep."""
        restricted = self.is_restricted[part]
        out = restricted[:, None].repeat(1, vocabulary)
        first, last = part.start, part.start + len(restricted)
        (ids, bits), (ids_end, bits_end) = self.ends[:, first].tolist(), self.ends[:, last].tolist()
        out[self.id_rows[ids:ids_end].long() - first, self.ids[ids:ids_end].long()] = False
        if bits < bits_end:
            shifts = torch.arange(8, dtype=torch.uint8, device=out.device)
            kept = (self.bits[bits:bits_end, :, None] >> shifts & 1).flatten(1)[:, :vocabulary].bool()
            rows = self.bit_rows[bits:bits_end] - first
            out[rows, : kept.shape[1]] = ~kept
        return out
