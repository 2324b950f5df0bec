"""How training completions are sampled, and how that changes during a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from grpo_dist.config.base import (
    TOP_K,
    TOP_P,
    Choice,
    Count,
    Fraction,
    Section,
    Tagged,
    Temperature,
    TopK,
    TopP,
)


class Scheduled(Choice):
    """Values by step."""

    tag = "kind"
    schedule: tuple[tuple[Count, Any], ...]

    def _contradictions(self) -> Iterator[str]:
        steps = [step for step, _ in self.schedule]
        if not steps or steps[0] != 0 or any(a >= b for a, b in pairwise(steps)):
            yield f"schedule has the steps {steps}; expected rising ones, the first of them 0"


class LengthSchedule(Scheduled):
    """The length by step."""

    kind: Literal["schedule"] = "schedule"
    schedule: tuple[tuple[Count, PositiveInt], ...] = Field(
        description="pairs of steps done and length: [[0, 8192], [500, 16384]] is 16384 from step 501 on"
    )


class AdaptiveLength(Choice):
    """A length that rises where completions are cut off."""

    tag = "kind"
    kind: Literal["adaptive"] = "adaptive"
    start: PositiveInt = Field(description="length at the start")
    largest: PositiveInt = Field(description="upper bound")
    factor: Annotated[float, Field(gt=1)] = Field(2.0, description="by which the length is raised")
    truncated_above: Fraction = Field(
        0.1, description="raise the length when a larger share of a step's samples is truncated"
    )
    patience: PositiveInt = Field(3, description="steps in a row that must be above it")

    def _contradictions(self) -> Iterator[str]:
        if self.largest <= self.start:
            yield f"largest = {self.largest} must be above start = {self.start}"


class TemperatureSchedule(Scheduled):
    """The temperature by step."""

    kind: Literal["schedule"] = "schedule"
    schedule: tuple[tuple[Count, Temperature], ...] = Field(
        description="pairs of steps done and temperature, linear in between: [[0, 1.2], [100, 0.8]]",
    )


class AdaptiveTemperature(Choice):
    """A temperature that follows the entropy of the samples."""

    tag = "kind"
    kind: Literal["adaptive"] = "adaptive"
    start: Temperature = Field(description="temperature at the start")
    entropy: PositiveFloat = Field(description="entropy to hold, nats per sampled token (`rollout/entropy`)")
    gain: Fraction = Field(0.25, description="largest relative change per step, as a share of 0.2")
    lowest: Temperature = Field(0.5, description="lower bound")
    highest: Temperature = Field(1.5, description="upper bound")

    def _contradictions(self) -> Iterator[str]:
        if not self.lowest <= self.start <= self.highest:
            yield (
                f"start = {self.start:g} must be between lowest = {self.lowest:g} and highest = "
                f"{self.highest:g}"
            )


class SamplingConfig(Section):
    """Sampling of training completions. With `top_p`, `top_k` or `min_p` the engine returns each token's
    candidates, and the trainer's softmax is over the same candidates: ratios stay exact.
    """

    temperature: Annotated[Temperature | TemperatureSchedule | AdaptiveTemperature, Tagged()] = Field(
        1.0, description="temperature of samples and of their log-probs; or how it changes during the run"
    )
    top_p: TopP = Field(1.0, description=TOP_P)
    top_k: TopK = Field(0, description=TOP_K)
    min_p: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="exclude tokens less likely than this share of the likeliest one; 0: none"
    )
    max_new_tokens: Annotated[PositiveInt | LengthSchedule | AdaptiveLength, Tagged()] = Field(
        512, description="longest completion, longer ones are truncated; or how it changes during the run"
    )
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (),
        description='texts that end a completion, or an action of an episode, and stay in it, e.g. ["\\n"]',
    )

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens are never sampled, so that engines return their sampling masks."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def lengths(self) -> Sequence[int]:
        """All values of `max_new_tokens` that are known before the run, bounds included."""
        length = self.max_new_tokens
        if isinstance(length, int):
            return [length]
        if isinstance(length, LengthSchedule):
            return [tokens for _, tokens in length.schedule]
        return [length.start, length.largest]

    @property
    def longest(self) -> int:
        """The largest `max_new_tokens` of the run, for which engines, memory and evaluations are sized."""
        return max(self.lengths)

    @property
    def shortest(self) -> int:
        """The smallest `max_new_tokens` of the run."""
        return min(self.lengths)

    @property
    def first_temperature(self) -> float:
        """The temperature of the first step."""
        temperature = self.temperature
        if isinstance(temperature, float):
            return temperature
        if isinstance(temperature, TemperatureSchedule):
            return temperature.schedule[0][1]
        return temperature.start

    @property
    def at_its_longest(self) -> SamplingConfig:
        """The settings with the first temperature and the largest length, for plans and benchmarks."""
        numbers = {"temperature": self.first_temperature, "max_new_tokens": self.longest}
        return self.model_copy(update=numbers)
