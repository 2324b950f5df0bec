"""From the parts of a reward to the reward: weights and gates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Term:
    """How one part counts. ``gate``: the part that must be above ``gate_above`` for this one to count."""

    name: str
    weight: float = 1.0
    gate: str | None = None
    gate_above: float = 0.0


def as_part(values: Any) -> np.ndarray:
    """float32 [G]; NaN, "could not be scored", for what is not a finite float32: NaN, infinity, 1e39."""
    numbers = np.asarray(values, dtype=np.float64)
    within = np.abs(numbers) <= np.finfo(np.float32).max
    return np.where(within, numbers, np.nan).astype(np.float32)


def combine(parts: Mapping[str, np.ndarray], terms: Sequence[Term]) -> np.ndarray:
    """float32 [G]: the sum of weight * part over ``terms``, each through its gate.

    A gated part is itself where its gate is above the threshold, 0 where it is not, and NaN where the gate
    is NaN. A gate may have a gate: then it is the gated value that is compared. The sum is NaN where a term
    of non-zero weight is, for what could not be scored is not 0; a term of weight 0 cannot spoil it. A part
    or sum that is not a finite float32 counts as NaN (`as_part`).

        math [1, 0, NaN] of weight 1, brevity [-0.5, -0.5, -0.5] of weight 2 with gate math -> [0, 0, NaN]
    """
    by_name = {term.name: term for term in terms}
    total = np.zeros(len(next(iter(parts.values()))), dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is NaN in the end
        for term in terms:
            if term.weight:
                total += term.weight * _gated(term, parts, by_name)
    return as_part(total)


def _gated(term: Term, parts: Mapping[str, np.ndarray], terms: Mapping[str, Term]) -> np.ndarray:
    own = as_part(parts[term.name]).astype(np.float64)
    if term.gate is None:
        return own
    gate = _gated(terms[term.gate], parts, terms)
    # Parts are float32 numbers: 0.6 as one is above 0.6, which it should not be.
    opens = gate > float(np.float32(term.gate_above))
    return np.where(np.isnan(gate), np.nan, np.where(opens, own, 0.0))
