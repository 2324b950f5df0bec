"""The arrays that every policy loss takes and returns. A row is a sample; index t describes its token t."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

TokenValues = Float[Tensor, "B T"]
TokenMask = Bool[Tensor, "B T"]
Number = float | int
Stats = dict[str, Tensor]  # sums over unmasked tokens; maxima where the name ends in _max
LossAndStats = tuple[TokenValues, Stats]
