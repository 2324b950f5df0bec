"""`sampling` during a run: scheduled by step, or adapted to the samples of earlier steps.

A batch keeps the settings of its launch, so adaptive settings lag by up to ``max_staleness`` steps. Each
sample records its settings, and its log-probs are computed with them.

`KLController` has the weight of the KL term, fixed or adapted to `algorithm.kl.target`.
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


def sampling_used(groups: Sequence[Group], current: Sampling) -> Sampling:
    """Return the recorded settings of ``groups``. Settings other than ``current`` take precedence: a mixture
    must not change the current settings.
    """
    rollouts = [r for group in groups for r in group.rollouts]
    heats = [r.temperature for r in rollouts if r.temperature not in (None, current.temperature)]
    lengths = [r.max_new_tokens for r in rollouts if r.max_new_tokens not in (None, current.max_new_tokens)]
    temperature, length = (*heats, current.temperature)[0], (*lengths, current.max_new_tokens)[0]
    assert temperature is not None and length is not None
    return replace(current, temperature=temperature, max_new_tokens=length)


class SamplingSchedule:
    """Sampling settings by batch. ``state``: of adaptive settings, from a checkpoint."""

    def __init__(self, settings: SamplingConfig, state: ScheduleState) -> None:
        self._settings, self.state = settings, state

    def of(self, batch: int) -> Sampling:
        """Return the settings of a batch that is launched now; step ``batch`` (from 0) trains on it."""
        temperature, length = self._temperature(batch), self._length(batch)
        settings = self._settings
        return Sampling(
            temperature, settings.top_p, settings.top_k, length, stop=settings.stop, min_p=settings.min_p
        )

    def observe(self, groups: Sequence[Group], sampling: Sampling) -> None:
        """Adapt to the ``groups`` of the next step, which were sampled with ``sampling``."""
        temperature, length, above = self.state.temperature, self.state.max_new_tokens, self.state.above
        heat, longest = self._settings.temperature, self._settings.max_new_tokens
        if isinstance(heat, AdaptiveTemperature):
            temperature = self._adapt_temperature(heat, sampled_entropy(groups), sampling.temperature)
        if isinstance(longest, AdaptiveLength):
            length, above = self._adapt_length(longest, truncated_share(groups), sampling.max_new_tokens)
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

    def _adapt_temperature(self, settings: AdaptiveTemperature, entropy: float, sampled_at: float) -> float:
        """Return the next temperature. Samples launched before the last change are ignored: they would repeat
        it and overshoot.
        """
        now = self._temperature(0)
        if sampled_at != now or not math.isfinite(entropy):
            return now
        temperature = steer(now, entropy, target=settings.entropy, gain=-settings.gain)
        return min(max(temperature, settings.lowest), settings.highest)

    def _adapt_length(self, settings: AdaptiveLength, truncated: float, length: int) -> tuple[int, int]:
        """Return the length, and the consecutive steps above the bound. Samples launched before the last
        rise are ignored: they say nothing about the new length.
        """
        now = self._length(0)
        if length != now:
            return now, self.state.above
        above = self.state.above + 1 if truncated > settings.truncated_above else 0
        if above < settings.patience or now == settings.largest:
            return now, min(above, settings.patience)
        return min(max(now + 1, round(now * settings.factor)), settings.largest), 0


class KLController:
    """``coef``: KL weight of the next update. ``resumed``: from a checkpoint; None: as configured."""

    def __init__(self, settings: KLConfig, resumed: float | None = None) -> None:
        self._settings = settings
        self.coef = settings.coef if resumed is None else resumed

    def observe(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Adapt ``coef`` to the KL in a step's ``metrics``; return the weight that the step was trained with.

        The weight stays if no target is set, the step had no token of the policy loss and so no KL, or
        the KL is not finite.
        """
        used, observed = self.coef, metrics.get("ref/kl")
        target, gain = self._settings.target, self._settings.gain
        if target is not None and observed is not None and math.isfinite(observed):
            self.coef = steer(used, observed, target=target, gain=gain)
        return {"ref/kl_coef": used}
