"""Settings of `grpo-dist bench`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from grpo_dist.config.base import Choice, Fraction, Section, Tagged


class NaturalLengths(Choice):
    """The model ends its completions."""

    tag = "kind"
    kind: Literal["natural"] = "natural"


class FixedLengths(Choice):
    """One length of all completions, in episodes of each action."""

    tag = "kind"
    kind: Literal["fixed"] = "fixed"
    tokens: PositiveInt | None = Field(None, description="the length; null: sampling.max_new_tokens")


class LognormalLengths(Choice):
    """Log-normal lengths, cut off at `sampling.max_new_tokens`, in episodes of each action."""

    tag = "kind"
    kind: Literal["lognormal"] = "lognormal"
    mean: PositiveFloat = Field(description="mean before truncation, e.g. 32")
    sigma: PositiveFloat = Field(1.0, description="deviation of the log")
    prompt_share: Fraction | None = Field(
        None, description="share of the log's variance that the samples of a prompt have in common; null: 0"
    )


LengthsConfig = NaturalLengths | FixedLengths | LognormalLengths


class BenchConfig(Section):
    """Settings of `grpo-dist bench`; nothing else reads them."""

    warmup_steps: PositiveInt = Field(2, description="untimed steps before the measurement")
    steps: PositiveInt = Field(5, description="timed steps")
    lengths: Annotated[LengthsConfig, Tagged()] = Field(
        NaturalLengths(), description="lengths of completions, tokens"
    )
    limits: bool = Field(True, description="also measure the limits of the machine")
