"""A curriculum by observed pass rate: prompts that are solved now and then come more often.

A group of which a share p is right teaches in proportion to p (1 - p), the variance of its rewards: nothing
where all are right or all wrong. The share is observed, forgetting slowly, and prompts not seen yet count as
half right, so a run begins with all prompts alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from grpo_dist.data.order import OrderState
from grpo_dist.types import Group, correctness

_FORGET = 0.5  # what earlier observations of a prompt still count when it comes again
_FLOOR = 0.02  # weight of a prompt that is always right, or always wrong: the policy changes, so ask again

Rates = dict[str, tuple[float, float]]  # uid -> (right, scored), both with forgetting


class Curriculum:
    """Observed pass rates and the draw that follows from them, the seed and the batch alone. A place is the
    index of a prompt.
    """

    def __init__(
        self, uids: Sequence[str], per_batch: int, *, seed: int, rates: Mapping[str, tuple[float, float]]
    ) -> None:
        """``per_batch``: prompts a batch takes, with those it may not need."""
        self._uids, self._per_batch, self._seed = list(uids), per_batch, seed
        self._rates: Rates = {uid: (right, scored) for uid, (right, scored) in rates.items()}

    @property
    def state(self) -> OrderState:
        return OrderState(pass_rates=dict(self._rates))

    def prompt(self, place: int) -> int:
        return place

    def trained(self, places: Sequence[int], sampled: Sequence[Group]) -> None:
        """Their rewards are observed."""
        for group in sampled:
            right = correctness(group)
            known = right[~np.isnan(right)]
            before = self._rates.get(group.prompt.uid, (0.0, 0.0))
            self._rates[group.prompt.uid] = (
                _FORGET * before[0] + float(known.sum()),
                _FORGET * before[1] + float(len(known)),
            )

    def take(self, batch: int) -> list[int]:
        """Each is drawn in proportion to its weight among those left (Gumbel top-k; Efraimidis and Spirakis
        2006).
        """
        noise = np.random.default_rng((self._seed, batch, 2)).gumbel(size=len(self._uids))
        return np.argsort(-(np.log(self._weights()) + noise), kind="stable")[: self._per_batch].tolist()

    def _weights(self) -> np.ndarray:
        """float64 [prompts]; 0.25 for one not seen yet."""
        right, scored = np.array([self._rates.get(uid, (0.0, 0.0)) for uid in self._uids]).T
        share = (right + 1.0) / (scored + 2.0)
        return np.maximum(share * (1.0 - share), _FLOOR)
