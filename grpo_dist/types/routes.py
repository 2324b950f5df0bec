"""The experts that each token of a sample took in the engine, for `policy.router_replay`.

    routes [T, L, k]: token, layer of the decoder, expert of that token     uint8, or uint16 above 256 experts

A sample of P prompt and C completion tokens has T = P + C - 1 routes: the engine never computes its last
token. Layers without experts have arbitrary numbers. With 48 layers of 8 experts a token takes 384 bytes, so
a sample holds only where its routes are. The driver does not fetch them; a policy rank fetches those of its
rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class Routes(Protocol):
    """Where routes are."""

    def fetch(self) -> np.ndarray:
        """Return them, [T, L, k]. Raises SamplesLost when they are lost."""
        ...

    def digest(self, tokens: int) -> bytes:
        """Return what samples have in common whose first ``tokens`` took the same experts."""
        ...


@dataclass(frozen=True, slots=True)
class HeldRoutes:
    """Routes in this process, or inside the message that holds them."""

    experts: np.ndarray

    def fetch(self) -> np.ndarray:
        return self.experts

    def digest(self, tokens: int) -> bytes:
        if tokens == 0:
            return b""
        return blake2b(self.experts[:tokens].tobytes(), digest_size=16).digest()
