"""`sampling` during a run: by step, or steered by what the samples of earlier steps were like.

A batch is given its settings when it is launched, and keeps them. What is steered therefore knows the steps
up to ``max_staleness`` before it; each sample records how it was drawn, and its log-probs are computed so.

`KLController` has the weight of the KL term, fixed or steered to `algorithm.kl.target`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from grpo_dist.algorithms.schedules import interpolated, latest, steer
from grpo_dist.config import KLConfig
from grpo_dist.config.sampling import (
    AdaptiveLength,
    AdaptiveTemperature,
    LengthSchedule,
    SamplingConfig,
    TemperatureSchedule,
)
from grpo_dist.loop.metrics import sampled_entropy, truncated_share
from grpo_dist.loop.progress import ScheduleState
from grpo_dist.types import Group, Sampling


def sampling_used(groups: Sequence[Group], asked: Sampling) -> Sampling:
    """Return how ``groups`` were drawn, by what their samples say. Where some were drawn otherwise than
    ``asked``, return that: a mixture must not steer what is asked now.
    """
    rollouts = [r for group in groups for r in group.rollouts]
    heats = [r.temperature for r in rollouts if r.temperature not in (None, asked.temperature)]
    lengths = [r.max_new_tokens for r in rollouts if r.max_new_tokens not in (None, asked.max_new_tokens)]
    temperature, length = (*heats, asked.temperature)[0], (*lengths, asked.max_new_tokens)[0]
    assert temperature is not None and length is not None
    return replace(asked, temperature=temperature, max_new_tokens=length)


class SamplingSchedule:
    """``state``: of what is steered, from a checkpoint."""

    def __init__(self, settings: SamplingConfig, state: ScheduleState) -> None:
        self._settings, self.state = settings, state

    def of(self, batch: int) -> Sampling:
        """Return how a batch is sampled that is launched now; step ``batch`` (from 0) trains on it."""
        temperature, length = self._temperature(batch), self._length(batch)
        settings = self._settings
        return Sampling(
            temperature, settings.top_p, settings.top_k, length, stop=settings.stop, min_p=settings.min_p
        )

    def observe(self, groups: Sequence[Group], sampling: Sampling) -> None:
        """Steer by the ``groups`` of the next step, which were drawn with ``sampling``."""
        temperature, length, above = self.state.temperature, self.state.max_new_tokens, self.state.above
        heat, longest = self._settings.temperature, self._settings.max_new_tokens
        if isinstance(heat, AdaptiveTemperature):
            temperature = self._steered(heat, sampled_entropy(groups), sampling.temperature)
        if isinstance(longest, AdaptiveLength):
            length, above = self._raised(longest, truncated_share(groups), sampling.max_new_tokens)
        self.state = ScheduleState(temperature, length, above)

    def _temperature(self, batch: int) -> float:
        setting = self._settings.temperature
        if isinstance(setting, TemperatureSchedule):
            return interpolated(setting.schedule, batch)
        return self.state.temperature or self._settings.first_temperature

    def _length(self, batch: int) -> int:
        setting = self._settings.max_new_tokens
        if isinstance(setting, LengthSchedule):
            return latest(setting.schedule, batch)
        return self.state.max_new_tokens or self._settings.shortest

    def _steered(self, settings: AdaptiveTemperature, entropy: float, sampled_at: float) -> float:
        """Return the next temperature. Samples that were launched before the last correction would repeat it,
        which overshoots.
        """
        now = self._temperature(0)
        if sampled_at != now or not math.isfinite(entropy):
            return now
        temperature = steer(now, entropy, target=settings.entropy, gain=-settings.gain)
        return min(max(temperature, settings.lowest), settings.highest)

    def _raised(self, settings: AdaptiveLength, truncated: float, length: int) -> tuple[int, int]:
        """Return the length and the steps in a row above the bound. Samples that were launched before the
        last rise say nothing about the new length.
        """
        now = self._length(0)
        if length != now:
            return now, self.state.above
        above = self.state.above + 1 if truncated > settings.truncated_above else 0
        if above < settings.patience or now == settings.largest:
            return now, min(above, settings.patience)
        return min(max(now + 1, round(now * settings.factor)), settings.largest), 0


class KLController:
    """``coef`` is the weight for the next update. ``resumed``: from a checkpoint; None: as configured."""

    def __init__(self, settings: KLConfig, resumed: float | None = None) -> None:
        self._settings = settings
        self.coef = settings.coef if resumed is None else resumed

    def observe(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Steer ``coef`` by the KL in a step's ``metrics``; return the weight that the step was trained with.

        The weight stays where no target is set, the step had no token of the policy loss and so no KL, or
        the KL is not finite.
        """
        used, observed = self.coef, metrics.get("ref/kl")
        target, gain = self._settings.target, self._settings.gain
        if target is not None and observed is not None and math.isfinite(observed):
            self.coef = steer(used, observed, target=target, gain=gain)
        return {"ref/kl_coef": used}
