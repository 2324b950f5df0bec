"""Combines the parts of a reward with weights and gates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Float64


@dataclass(frozen=True, slots=True)
class Term:
    """Weight and gate of one part. The part counts only while part ``gate`` is above ``gate_above``."""

    name: str
    weight: float = 1.0
    gate: str | None = None
    gate_above: float = 0.0


def as_part(values: Any) -> Float32[np.ndarray, " G"]:
    """Convert to float32; a value that is not finite as float32 (infinity, 1e39) becomes NaN."""
    numbers = np.asarray(values, dtype=np.float64)
    within = np.abs(numbers) <= np.finfo(np.float32).max
    return np.where(within, numbers, np.nan).astype(np.float32)


def combine(parts: Mapping[str, Float[np.ndarray, " G"]], terms: Sequence[Term]) -> Float32[np.ndarray, " G"]:
    """Sum weight * part over ``terms``, each part after its gate.

    A gated part keeps its value where its gate is above the threshold, is 0 where it is not, and NaN where
    the gate is NaN. The gate of a gate is applied first. The sum is NaN where a term of non-zero weight is
    NaN, since "not scored" is not 0. A part or sum that is not finite as float32 is NaN (`as_part`).

        math [1, 0, NaN] of weight 1, brevity [-0.5, -0.5, -0.5] of weight 2 with gate math -> [0, 0, NaN]
    """
    by_name = {term.name: term for term in terms}
    total = np.zeros(len(next(iter(parts.values()))), dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # overflow becomes NaN in `as_part`
        for term in terms:
            if term.weight:
                total += term.weight * _gated(term, parts, by_name)
    return as_part(total)


def _gated(
    term: Term, parts: Mapping[str, Float[np.ndarray, " G"]], terms: Mapping[str, Term]
) -> Float64[np.ndarray, " G"]:
    own = as_part(parts[term.name]).astype(np.float64)
    if term.gate is None:
        return own
    gate = _gated(terms[term.gate], parts, terms)
    # Parts are float32, and float32(0.6) is above the float64 0.6.
    opens = gate > float(np.float32(term.gate_above))
    return np.where(np.isnan(gate), np.nan, np.where(opens, own, 0.0))
