"""The model, what it is asked, and how it answers."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from grpo_dist.config.base import Section, Temperature


class ModelConfig(Section):
    """The model that is trained, and how it is held."""

    path: str = Field(
        description="local directory, hub id, `demo:<name>` for a model this project makes, or "
        "`random:<config.json>` for random weights of that shape"
    )
    revision: str | None = Field(None, description="branch, tag or commit of a hub model")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="auto: bfloat16 where the accelerator supports it, else float32"
    )
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = Field(
        "auto", description="trainer attention"
    )
    packing: bool = Field(
        True,
        description="trainer and reference see rows end to end without padding, the prompt of a group once; "
        "false: padded rows",
    )
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward pass")
    trust_remote_code: bool = Field(False, description="run Python code that ships with the model")
    max_length: PositiveInt | None = Field(
        None,
        description="longest prompt + completion, tokens; null: data.max_prompt_tokens + the longest "
        "completion",
    )


class DataSourceConfig(Section):
    """Where problems with their answers come from."""

    path: str = Field(description="JSONL or Parquet file, local data set directory, hub id, or `demo:<name>`")
    split: str = Field("train", description="split of a data set that has several")
    name: str | None = Field(
        None,
        pattern="^[^/]+$",
        description="label in metrics and samples; null: the file's or data set's name",
    )
    subset: str | None = Field(None, description="configuration name of a hub data set")
    problem_column: str = Field("problem", description="column with the text of the problem")
    answer_column: str = Field("answer", description="column with the answer, or with text that ends in it")
    answer_pattern: str | None = Field(None, description="regular expression whose group 1 is the answer")
    columns: tuple[str, ...] = Field((), description="further columns handed to rewards")
    max_rows: PositiveInt | None = Field(None, description="use the first so many; null: all")

    @model_validator(mode="after")
    def _pattern_has_a_group(self) -> DataSourceConfig:
        try:
            groups = re.compile(self.answer_pattern or "()").groups
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(
                f"answer_pattern {str(self.answer_pattern)[:200]!r} is not a regular expression: {error}"
            ) from error
        if groups < 1:
            raise ValueError(
                f"answer_pattern {self.answer_pattern!r} has no group; put ( ) around the answer"
            )
        return self


class DataConfig(Section):
    """What is asked, in training and in evaluations."""

    train: tuple[DataSourceConfig, ...] = Field(
        min_length=1, description="sources of training prompts, together"
    )
    eval: tuple[DataSourceConfig, ...] = Field(
        (), description="evaluation sets, each with metrics of its own"
    )
    system_prompt: str | None = Field(
        None, description="put before every problem: the chat template's system message, or a first line"
    )
    instruction: str | None = Field(None, description="appended to every problem")
    chat_template: Literal["model", "none"] = Field("model", description="none: the problem text as it is")
    template_kwargs: dict[str, Any] = Field({}, description="further arguments of the chat template")
    max_prompt_tokens: PositiveInt = Field(512, description="longest prompt, chat template included")
    overlong: Literal["refuse", "drop"] = Field("refuse", description="what to do with longer prompts")
    order: Literal["epochs", "pass_rate"] = Field(
        "epochs", description="pass_rate: prompts that are solved now and then come more often"
    )
    overlap: Literal["refuse", "warn"] = Field(
        "warn", description="evaluation problems found in the training set"
    )


class BatchConfig(Section):
    """A step draws prompts_per_step * samples_per_prompt samples."""

    prompts_per_step: PositiveInt = Field(16, description="prompts, each with a group of samples")
    samples_per_prompt: Annotated[int, Field(ge=2)] = Field(
        8, description="samples of a prompt, whose rewards are compared: the group size G"
    )
    updates_per_step: PositiveInt = Field(
        1, description="optimiser updates a step is split into; 1 is on-policy"
    )
    epochs_per_batch: PositiveInt = Field(1, description="times a step goes through its samples")
    micro_batch_tokens: PositiveInt | None = Field(
        None, description="tokens a rank holds in one forward; null: 16384 on a GPU, 4096 elsewhere"
    )


class DynamicSamplingConfig(Section):
    """DAPO: groups whose rewards are all equal are replaced by further prompts, the next of the epoch."""

    enabled: bool = Field(False, description="whether they are")
    max_extra_prompts: PositiveInt | None = Field(
        None,
        description="most further prompts a step; null: three times batch.prompts_per_step. Of small data "
        "fewer: batches on their way together take an epoch at most",
    )
    oversample: Annotated[float, Field(ge=1)] = Field(
        1.0, description="further prompts asked at once for every group that is missing"
    )


class SamplingConfig(Section):
    """How the completions of training are drawn: from the whole distribution, by temperature alone."""

    temperature: Temperature = Field(1.0, description="log-probs of engine and trainer are taken at it")
    max_new_tokens: PositiveInt = Field(512, description="longest completion; longer ones are cut off")
