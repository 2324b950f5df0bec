"""What is done apart from the loop: a cold start, rejection sampling."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, model_validator

from grpo_dist.config.base import Count, Fraction, NonNegative, Section, Seed, Temperature


class RejectionConfig(Section):
    """Rejection sampling: completions of the prompts of `data.train`, of which the right ones are kept."""

    samples_per_prompt: PositiveInt = Field(8, description="samples drawn of each prompt")
    max_prompts: PositiveInt | None = Field(None, description="so many prompts, drawn by seed; null: all")
    temperature: Temperature = Field(1.0, description="of the samples")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="draw from the likeliest tokens that have this share together; 1: from all"
    )
    top_k: Count = Field(0, description="draw from the so many likeliest tokens; 0: from all")
    max_new_tokens: PositiveInt | None = Field(None, description="null: sampling.max_new_tokens")
    min_reward: float = Field(1.0, description="a sample of at least this total reward is kept")
    keep_per_prompt: PositiveInt = Field(1, description="different completions kept of a prompt, at most")
    prefer: Literal["shortest", "first", "random"] = Field(
        "shortest", description="which are kept where a prompt has more"
    )
    max_pass_rate: Fraction = Field(
        1.0, description="drop prompts whose share of kept-worthy samples is above; below 1: the too easy"
    )
    chunk_prompts: PositiveInt = Field(512, description="prompts sampled between two saves")

    @model_validator(mode="after")
    def _keeps_what_there_is(self) -> RejectionConfig:
        if self.keep_per_prompt > self.samples_per_prompt:
            raise ValueError(
                f"keep_per_prompt = {self.keep_per_prompt} is above samples_per_prompt = "
                f"{self.samples_per_prompt}; sample more or keep fewer"
            )
        return self


class DemonstrationsConfig(Section):
    """One source of (prompt, completion) pairs; null takes the value of the `sft` section."""

    path: str = Field(description="JSONL file with `prompt` and `completion`, or `demo:<name>`")
    examples: PositiveInt | None = Field(None, description="use the first so many")
    noise: Fraction | None = Field(
        None, description="share of generated demonstrations that carry one wrong step"
    )

    @model_validator(mode="after")
    def _noise_is_of_what_is_made(self) -> DemonstrationsConfig:
        if self.noise is not None and not self.path.startswith("demo:"):
            raise ValueError(
                f"noise = {self.noise:g} is of demonstrations that are generated, and path = {self.path} is "
                "not demo:...; remove it"
            )
        return self


def _as_sources(value: Any) -> Any:
    """A path alone, or a list that has some, as the mappings of Demonstrations they stand for."""
    values = [value] if isinstance(value, str | dict) else value
    if not isinstance(values, list | tuple):
        return value
    return [{"path": v} if isinstance(v, str) else v for v in values]


class SFTConfig(Section):
    """Supervised training, as of a cold start: next-token loss on the response of (prompt, completion)
    pairs.
    """

    model: str = Field(description="local directory, or `demo:<name>` for a model made from the seed")
    data: Annotated[tuple[DemonstrationsConfig, ...], Field(min_length=1), BeforeValidator(_as_sources)] = (
        Field(description="a path as in `sft.data.0.path`, or a list of sources that are mixed")
    )
    examples: PositiveInt | None = Field(None, description="use the first so many of a source; null: all")
    noise: Fraction = Field(0.0, description="share of generated demonstrations that carry one wrong step")
    steps: PositiveInt = Field(500, description="optimiser steps")
    batch_size: PositiveInt = Field(48, description="demonstrations of a step")
    lr: PositiveFloat = Field(2e-3, description="highest learning rate; for pretrained models e.g. 1e-5")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.95), description="decay of AdamW's two averages")
    weight_decay: NonNegative = Field(0.01, description="decoupled, times the learning rate")
    warmup_steps: Count = Field(20, description="steps over which the learning rate rises; then it falls")
    min_lr_ratio: Fraction = Field(0.1, description="final learning rate as a share of lr")
    max_grad_norm: PositiveFloat = Field(1.0, description="a gradient of larger norm is scaled down to it")
    max_length: PositiveInt = Field(
        1024, description="longest prompt + completion, tokens; longer is refused"
    )
    seed: Seed = Field(
        0, description="of the order of demonstrations, of generated ones, and of a demo model's weights"
    )
    threads: Count = Field(0, description="CPU threads; 0: all")
