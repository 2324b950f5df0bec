"""Engines and policy ranks that are slower than the others."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_dist.tools.plan.engines import EngineTimes


@dataclass(frozen=True, slots=True)
class Stragglers:
    """``engines``: number of engines that take ``engine_factor`` times as long to sample.
    ``rank_factor``: how many times as long the slowest policy rank takes for an update; the others wait for
    it. Syncs and changes of turns take no longer.
    """

    engines: int = 0
    engine_factor: float = 1.0
    rank_factor: float = 1.0


NO_STRAGGLERS = Stragglers()


class SlowTimes:
    """The times of an engine that takes ``factor`` times as long as ``times``."""

    def __init__(self, times: EngineTimes, factor: float) -> None:
        self._times, self._factor = times, factor

    def decode_step_s(self, sequences: float, context: float) -> float:
        return self._factor * self._times.decode_step_s(sequences, context)

    def prefill_s(self, tokens: float) -> float:
        return self._factor * self._times.prefill_s(tokens)
