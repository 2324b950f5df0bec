"""Curriculum by observed pass rate: prompts that are solved sometimes are sampled more often.

The learning signal of a group with pass rate p is proportional to p (1 - p), the variance of its rewards:
zero if all samples are correct or all are wrong. Pass rates are running averages with decay. Unseen prompts
count as half correct, so a run starts with equal weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from grpo_dist.data.order import OrderState
from grpo_dist.types import Group, correctness

_DECAY = 0.5  # weight of earlier observations when a prompt is observed again
_FLOOR = 0.02  # weight of a prompt that is always correct or always wrong, since the policy changes

Rates = dict[str, tuple[float, float]]  # uid -> (correct, scored), both decayed


class Curriculum:
    """Draws prompts by observed pass rate, deterministic in rates, seed and batch.

    An order index is the index of a prompt.
    """

    def __init__(
        self, uids: Sequence[str], per_batch: int, *, seed: int, rates: Mapping[str, tuple[float, float]]
    ) -> None:
        """``per_batch`` is the number of prompts a batch takes, including those it may not need."""
        self._uids, self._per_batch, self._seed = list(uids), per_batch, seed
        self._rates: Rates = {uid: (right, scored) for uid, (right, scored) in rates.items()}

    @property
    def state(self) -> OrderState:
        return OrderState(pass_rates=dict(self._rates))

    def prompt(self, index: int) -> int:
        return index

    def trained(self, indices: Sequence[int], sampled: Sequence[Group]) -> None:
        """Update the pass rates from the rewards."""
        for group in sampled:
            right = correctness(group)
            known = right[~np.isnan(right)]
            before = self._rates.get(group.prompt.uid, (0.0, 0.0))
            self._rates[group.prompt.uid] = (
                _DECAY * before[0] + float(known.sum()),
                _DECAY * before[1] + float(len(known)),
            )

    def take(self, batch: int) -> list[int]:
        """Draw by weight without replacement (Gumbel top-k; Efraimidis and Spirakis 2006)."""
        noise = np.random.default_rng((self._seed, batch, 2)).gumbel(size=len(self._uids))
        return np.argsort(-(np.log(self._weights()) + noise), kind="stable")[: self._per_batch].tolist()

    def _weights(self) -> np.ndarray:
        """Compute float64 [prompts]; 0.25 for an unseen prompt."""
        right, scored = np.array([self._rates.get(uid, (0.0, 0.0)) for uid in self._uids]).T
        share = (right + 1.0) / (scored + 2.0)
        return np.maximum(share * (1.0 - share), _FLOOR)
