"""A mixture of sources by weight: `data.train[].weight`.

    weights math 3, code 1    draws math math code math math math math code ...

Draw m belongs to the source that the fraction of (m + 1) times the golden ratio falls to, the shares of the
sources laid end to end. Such fractions fill [0, 1) evenly, so the first n draws differ from the shares by a
few draws for every n (Steinhaus' three-gap theorem). The draws of a source go through its prompts in epochs,
each a permutation drawn from the seed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from grpo_dist.config import DataConfig
from grpo_dist.data.order import shuffled
from grpo_dist.types import Prompt

_GOLDEN = (5**0.5 - 1) / 2
_BLOCK = 4096  # draws computed at once
_ROUNDING = 1e-6  # of a share times a number of prompts: 0.07 * 100 is above 7


class Mixture:
    """An endless sequence of prompts.

    Args:
        sources: of each prompt.
        weights: of each source.
    """

    def __init__(self, sources: Sequence[str], weights: Mapping[str, float], *, seed: int) -> None:
        names, own = list(weights), np.array(sources)
        self._members = [np.flatnonzero(own == name) for name in names]
        shares = np.array([weights[name] for name in names], np.float64)
        self._ends = np.cumsum(shares / shares.sum())[:-1]
        self._seeds = [seed + 1_000_003 * i for i in range(len(names))]
        self._source = np.empty(0, np.int64)  # of each draw so far
        self._number = np.empty(0, np.int64)  # of the draw among those of its source
        # The latest epoch of each source: sources take turns, and there may be many.
        self._epochs: list[tuple[int, np.ndarray]] = [(-1, np.empty(0, np.int64))] * len(names)

    def prompt(self, draw: int) -> int:
        """Return the prompt, 0..n-1, of a draw."""
        while draw >= len(self._source):
            self._extend()
        source = int(self._source[draw])
        members = self._members[source]
        epoch, at = divmod(int(self._number[draw]), len(members))
        if self._epochs[source][0] != epoch:
            self._epochs[source] = epoch, shuffled(len(members), self._seeds[source], epoch)
        return int(members[self._epochs[source][1][at]])

    def _extend(self) -> None:
        begin = len(self._source)
        fractions = (np.arange(begin + 1, begin + _BLOCK + 1) * _GOLDEN) % 1.0
        found = np.searchsorted(self._ends, fractions, side="right")
        number = np.empty(_BLOCK, np.int64)
        for source in range(len(self._members)):
            own = found == source
            number[own] = np.count_nonzero(self._source == source) + np.arange(np.count_nonzero(own))
        self._source = np.concatenate([self._source, found])
        self._number = np.concatenate([self._number, number])


def most_at_once(weights: Mapping[str, float], prompts: Sequence[Prompt]) -> int:
    """Return how many of ``prompts`` can be drawn and none of them twice: all, or with ``weights``, the share
    of each source, as many as the source allows that has the fewest for its share.

        4000 and 600 prompts, each source a half    1200
    """
    if not weights:
        return len(prompts)
    counts = Counter(prompt.source for prompt in prompts)
    return math.floor(min(counts[name] / share for name, share in weights.items()) + _ROUNDING)


def check_weights(data: DataConfig, prompts: Sequence[Prompt], *, in_flight: int) -> None:
    """Check that every source can give its share. ``in_flight``: prompts of all steps on their way.

    Raises ValueError where the prompts of a source are fewer, so that it would be drawn twice at once.
    """
    counts = Counter(prompt.source for prompt in prompts)
    for name, share in data.weights.items():
        if share * in_flight > counts[name] + _ROUNDING:
            raise ValueError(
                f"data.train: source {name} has {counts[name]} prompts, but with its `weight` it gives "
                f"{share:.0%} of the {in_flight} that may be on their way at once; lower its weight, "
                "`batch.prompts_per_step` or `max_staleness`, or give it more prompts"
            )
