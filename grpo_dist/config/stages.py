"""Stages outside the training loop: the supervised cold start and rejection sampling."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt

from grpo_dist.config.base import (
    TOP_K,
    TOP_P,
    Count,
    Fraction,
    NonNegative,
    Section,
    Seed,
    Temperature,
    TopK,
    TopP,
)


class RejectionConfig(Section):
    """Rejection sampling: draw completions of the prompts of `data.train` and keep the correct ones."""

    samples_per_prompt: PositiveInt = Field(8, description="samples per prompt")
    max_prompts: PositiveInt | None = Field(None, description="number of prompts, drawn by seed; null: all")
    temperature: Temperature = Field(1.0, description="sampling temperature")
    top_p: TopP = Field(1.0, description=TOP_P)
    top_k: TopK = Field(0, description=TOP_K)
    max_new_tokens: PositiveInt | None = Field(None, description="null: the largest sampling.max_new_tokens")
    min_reward: float = Field(1.0, description="keep samples with at least this total reward")
    keep_per_prompt: PositiveInt = Field(
        1, description="most distinct completions kept per prompt, the shortest"
    )
    max_pass_rate: Fraction = Field(
        1.0, description="drop prompts with a larger share of samples to keep; below 1: drops easy prompts"
    )

    def _contradictions(self) -> Iterator[str]:
        if self.keep_per_prompt > self.samples_per_prompt:
            yield (
                f"keep_per_prompt = {self.keep_per_prompt} is above samples_per_prompt = "
                f"{self.samples_per_prompt}; sample more or keep fewer"
            )


class DemonstrationsConfig(Section):
    """One source of (prompt, completion) pairs."""

    path: str = Field(
        description="data file with `prompt` and `completion`, or `messages`, or a directory of these, or "
        "`demo:<name>`"
    )
    examples: PositiveInt | None = Field(None, description="examples used, from the start; null: all")
    noise: Fraction = Field(
        0.0,
        description="share of generated demonstrations with one wrong step (demo:add3), or with a guess "
        "instead of a calculator call (demo:products)",
    )

    def _contradictions(self) -> Iterator[str]:
        if self.noise and not self.path.startswith("demo:"):
            yield (
                f"noise = {self.noise:g} applies only to generated demonstrations (demo:...), but path = "
                f"{self.path}; remove it"
            )


def read_sources(value: Any) -> Any:
    """Expand a path, or paths in a list, to mappings of `DemonstrationsConfig`."""
    values = [value] if isinstance(value, str | dict) else value
    if not isinstance(values, list | tuple):
        return value
    return [{"path": v} if isinstance(v, str) else v for v in values]


class SFTConfig(Section):
    """Supervised training: cross-entropy on the completions of (prompt, completion) pairs. `model.path: sft`
    trains in one process, in float32; `grpo-dist sft` and the sft stage of a pipeline train on the ranks of
    `policy`.
    """

    section: ClassVar[str] = "sft"

    model: str = Field(description="local directory, hub id, or `demo:<name>`")
    data: Annotated[tuple[DemonstrationsConfig, ...], Field(min_length=1), BeforeValidator(read_sources)] = (
        Field(description="a path as in `sft.data.0.path`, or a list of sources to mix")
    )
    steps: PositiveInt = Field(500, description="optimiser steps; not read with `epochs`")
    epochs: PositiveFloat | None = Field(
        None, description="passes over the demonstrations, instead of `steps`, e.g. 2; null: `steps`"
    )
    batch_size: PositiveInt = Field(48, description="demonstrations per step")
    lr: PositiveFloat = Field(2e-3, description="highest learning rate; for pretrained models e.g. 1e-5")
    weight_decay: NonNegative = Field(0.01, description="decoupled weight decay, scaled by the learning rate")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "linear", description="decay of the learning rate after warm-up"
    )
    warmup_steps: Count = Field(20, description="steps over which the learning rate rises, before it decays")
    min_lr_ratio: Fraction = Field(0.1, description="final learning rate as a share of lr")
    max_length: PositiveInt = Field(
        1024, description="longest prompt + completion, tokens; longer pairs are refused"
    )
    seed: Seed = Field(
        0, description="random seed of the order of demonstrations, generated demonstrations and demo weights"
    )
    validation_share: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="share of the demonstrations held out for `validation/loss`. Not in a cold start "
        "(`model.path: sft`)",
    )
    validate_every: Count = Field(
        100, description="steps between validation losses; 0: only before the first step and after the last"
    )

    def steps_for(self, demonstrations: int) -> int:
        """Return the optimiser steps on ``demonstrations`` training demonstrations."""
        if self.epochs is None:
            return self.steps
        return max(1, math.ceil(self.epochs * demonstrations / self.batch_size))
