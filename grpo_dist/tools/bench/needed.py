"""Counts the work that the result of an update needs of a trainer. A shared prompt prefix counts once.

It is the work of `training/mfu`, and of the loop that is the limit of training. What all updates of a step
share counts once, and so does what all ranks share: neither can share it, so the limit is a little too high.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_dist.batch.shared_prefixes import shared_prefix_lengths
from grpo_dist.tools.bench.flops import Shape, decoder_flops
from grpo_dist.tools.bench.record import StepRecord


@dataclass(frozen=True, slots=True)
class NeededWork:
    """``tokens``: each shared prefix once. ``pairs``: of these tokens with the tokens that they attend to.
    ``trained``: of these tokens.
    """

    tokens: int
    pairs: int
    trained: int

    @classmethod
    def from_step(cls, step: StepRecord) -> NeededWork:
        """Return the work of the samples of ``step``."""
        distinct = [np.array(ids) for ids in {r.prompt_ids for r in step.requests}]
        prompts = zip(map(len, distinct), shared_prefix_lengths(distinct).tolist(), strict=True)
        spans = [
            *((len(r.prompt_ids), r.tokens) for r in step.requests),
            *((length, n) for n, length in prompts),
        ]
        return cls.from_spans(spans, trained=sum(r.length for r in step.requests))

    @classmethod
    def from_spans(cls, spans: Sequence[tuple[int, int]], *, trained: int) -> NeededWork:
        """Return the work of the tokens from ``begin`` to ``end`` of sequences, each with all before it."""
        return cls(
            tokens=sum(end - begin for begin, end in spans),
            pairs=sum(_pairs(end) - _pairs(begin) for begin, end in spans),
            trained=trained,
        )

    def __add__(self, other: NeededWork) -> NeededWork:
        return NeededWork(self.tokens + other.tokens, self.pairs + other.pairs, self.trained + other.trained)

    def row_tokens(self, longest: int) -> int:
        """Return the tokens of rows that share nothing and have as many pairs for each token. They are not
        longer than the ``longest`` sample, whose memory is there.
        """
        return max(1, min(longest, round(2 * self.pairs / self.tokens - 1)))

    def flops(self, shape: Shape, *, frozen: bool = False) -> float:
        """Return the operations of a forward and a backward pass. ``frozen``: adapters alone are trained."""
        return decoder_flops(shape, self.tokens, self.pairs, self.trained, frozen=frozen)


def _pairs(tokens: int) -> int:
    """Return the pairs of causal attention over ``tokens``: each with itself and all before it."""
    return tokens * (tokens + 1) // 2
