"""What a benchmark does."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from grpo_dist.config.base import Section


class LengthsConfig(Section):
    """Lengths of completions, tokens; none is above `sampling.max_new_tokens`."""

    kind: Literal["natural", "fixed", "lognormal"] = Field(
        "natural", description="natural: the model ends its completions; else they have set lengths"
    )
    tokens: PositiveInt | None = Field(None, description="of fixed; null: sampling.max_new_tokens")
    mean: PositiveFloat | None = Field(None, description="of lognormal, before it is cut off")
    sigma: PositiveFloat | None = Field(None, description="of lognormal: deviation of the log; null: 1")

    @model_validator(mode="after")
    def _settings_of_its_kind(self) -> LengthsConfig:
        own = {"fixed": ("tokens",), "lognormal": ("mean", "sigma")}.get(self.kind, ())
        for name in sorted({"tokens", "mean", "sigma"} - set(own)):
            if getattr(self, name) is not None:
                value = getattr(self, name)
                raise ValueError(f"{name} = {value} is no setting of kind {self.kind}; remove it")
        if self.kind == "lognormal" and self.mean is None:
            raise ValueError("kind lognormal needs a mean, e.g. mean: 32")
        return self


class BenchConfig(Section):
    """What `grpo-dist bench` does with a configuration; nothing else reads it."""

    warmup_steps: PositiveInt = Field(2, description="steps before the clock starts")
    steps: PositiveInt = Field(5, description="timed steps")
    lengths: LengthsConfig = LengthsConfig()
    limits: bool = Field(True, description="measure what the machine could do at best, too")
