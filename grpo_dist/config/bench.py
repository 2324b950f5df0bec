"""Settings of `grpo-dist bench`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from grpo_dist.config.base import Fraction, Section


class LengthsConfig(Section):
    """Lengths of completions, tokens; none is above `sampling.max_new_tokens`."""

    kind: Literal["natural", "fixed", "lognormal"] = Field(
        "natural",
        description="natural: the model ends its completions; otherwise lengths are set, in episodes of each "
        "action",
    )
    tokens: PositiveInt | None = Field(
        None, description="kind fixed: the length; null: sampling.max_new_tokens"
    )
    mean: PositiveFloat | None = Field(None, description="kind lognormal: mean before truncation")
    sigma: PositiveFloat | None = Field(None, description="kind lognormal: deviation of the log; null: 1")
    prompt_share: Fraction | None = Field(
        None,
        description="kind lognormal: share of the log's variance that the samples of a prompt have in "
        "common; null: 0",
    )

    def _contradictions(self) -> Iterator[str]:
        own = {"fixed": ("tokens",), "lognormal": ("mean", "sigma", "prompt_share")}.get(self.kind, ())
        for name in sorted({"tokens", "mean", "sigma", "prompt_share"} - set(own)):
            if getattr(self, name) is not None:
                value = getattr(self, name)
                yield f"{name} = {value} is not a setting of kind {self.kind}; remove it"
        if self.kind == "lognormal" and self.mean is None:
            yield "kind lognormal needs a mean, e.g. mean: 32"


class BenchConfig(Section):
    """Settings of `grpo-dist bench`; nothing else reads them."""

    warmup_steps: PositiveInt = Field(2, description="untimed steps before the measurement")
    steps: PositiveInt = Field(5, description="timed steps")
    lengths: LengthsConfig = LengthsConfig()
    limits: bool = Field(True, description="also measure the limits of the machine")
