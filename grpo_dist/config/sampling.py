"""How training completions are sampled, and how that changes during a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Annotated, Any, TypeVar

from pydantic import Discriminator, Field, PositiveFloat, PositiveInt, Tag

from grpo_dist.config.base import Count, Fraction, Section, Temperature


class LengthSchedule(Section):
    """A length that changes during the run: `schedule` gives it by step; `start`, `largest` raise it where
    completions are cut off.
    """

    schedule: tuple[tuple[Count, PositiveInt], ...] | None = Field(
        None,
        description="pairs of steps done and length: [[0, 8192], [500, 16384]] is 16384 from step 501 on",
    )
    start: PositiveInt | None = Field(None, description="length at the start")
    largest: PositiveInt | None = Field(None, description="upper bound of a length that is raised")
    factor: Annotated[float, Field(gt=1)] = Field(2.0, description="by which the length is raised")
    truncated_above: Fraction = Field(
        0.1, description="raise the length when a larger share of a step's samples is truncated"
    )
    patience: PositiveInt = Field(3, description="steps in a row that must be above it")

    def _contradictions(self) -> Iterator[str]:
        _check_kind(self, "largest")
        if self.start is not None and self.largest is not None and self.largest <= self.start:
            yield f"largest = {self.largest} must be above start = {self.start}"


class TemperatureSchedule(Section):
    """A temperature that changes during the run: `schedule` gives it by step; `start`, `entropy` steer it."""

    schedule: tuple[tuple[Count, Temperature], ...] | None = Field(
        None,
        description="pairs of steps done and temperature, linear in between: [[0, 1.2], [100, 0.8]] is 1.0 "
        "in step 51",
    )
    start: Temperature | None = Field(None, description="temperature at the start")
    entropy: PositiveFloat | None = Field(
        None, description="entropy to hold, nats per sampled token (`rollout/entropy`)"
    )
    gain: Fraction = Field(0.25, description="largest relative change per step, as a share of 0.2")
    lowest: Temperature = Field(0.5, description="lower bound of a steered temperature")
    highest: Temperature = Field(1.5, description="upper bound of a steered temperature")

    def _contradictions(self) -> Iterator[str]:
        _check_kind(self, "entropy")
        if self.start is not None and not self.lowest <= self.start <= self.highest:
            yield (
                f"start = {self.start:g} must be between lowest = {self.lowest:g} and highest = "
                f"{self.highest:g}"
            )


def _check_kind(section: LengthSchedule | TemperatureSchedule, goal: str) -> None:
    """Raise ValueError unless ``section`` has either a schedule, or `start` and ``goal``."""
    steered = [name for name in ("start", goal) if getattr(section, name) is not None]
    if section.schedule is None and len(steered) < 2:
        raise ValueError(f"expected `schedule`, or `start` and `{goal}`")
    if section.schedule is None:
        return
    fields = type(section).model_fields
    others = [n for n in fields if n != "schedule" and getattr(section, n) != fields[n].default]
    if others:
        raise ValueError(f"`schedule` leaves nothing to `{others[0]}`; remove one of them")
    steps = [step for step, _ in section.schedule]
    if not steps or steps[0] != 0 or any(a >= b for a, b in pairwise(steps)):
        raise ValueError(f"schedule has the steps {steps}; expected rising ones, the first of them 0")


def _kind(value: Any) -> str:
    return "changing" if isinstance(value, dict | Section) else "number"


Number = TypeVar("Number")
Schedule = TypeVar("Schedule")
# A number, or a section with its schedule.
NumberOr = Annotated[
    Annotated[Number, Tag("number")] | Annotated[Schedule, Tag("changing")], Discriminator(_kind)
]


class SamplingConfig(Section):
    """Sampling of training completions: from the full distribution, with a temperature only."""

    temperature: NumberOr[Temperature, TemperatureSchedule] = Field(
        1.0, description="temperature of samples and of their log-probs; or how it changes during the run"
    )
    max_new_tokens: NumberOr[PositiveInt, LengthSchedule] = Field(
        512, description="longest completion, longer ones are truncated; or how it changes during the run"
    )
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (),
        description='texts that end a completion, of evaluations as well, e.g. ["\\n"]; the token that '
        "completes one belongs to the completion. The end-of-sequence token ends it, too",
    )

    @property
    def lengths(self) -> Sequence[int]:
        """All values of `max_new_tokens` that are known before the run, the bounds among them."""
        length = self.max_new_tokens
        if isinstance(length, int):
            return [length]
        if length.schedule is not None:
            return [tokens for _, tokens in length.schedule]
        assert length.start is not None and length.largest is not None  # its validator has seen to it
        return [length.start, length.largest]

    @property
    def longest(self) -> int:
        """The largest `max_new_tokens` of the run: engines, memory and evaluations are made for it."""
        return max(self.lengths)

    @property
    def shortest(self) -> int:
        """The smallest `max_new_tokens` of the run."""
        return min(self.lengths)

    @property
    def first_temperature(self) -> float:
        """The temperature of the first step."""
        own = self.temperature
        if isinstance(own, float):
            return own
        if own.schedule is not None:
            return own.schedule[0][1]
        assert own.start is not None  # its validator has seen to it
        return own.start

    @property
    def at_its_longest(self) -> SamplingConfig:
        """Numbers for plans and benchmarks: the first temperature, and the largest length."""
        numbers = {"temperature": self.first_temperature, "max_new_tokens": self.longest}
        return self.model_copy(update=numbers)
