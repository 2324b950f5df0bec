"""Model, data and batches."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

import regex
from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt

from grpo_dist.config.algorithm import AlgorithmConfig, SourceAlgorithmConfig
from grpo_dist.config.base import Choice, Section, Tagged, Temperature
from grpo_dist.config.environments import EnvironmentName
from grpo_dist.config.text import names_in
from grpo_dist.errors import expanded
from grpo_dist.plugins.user_code import ORDER, SOURCE, OrderName, UserComponent, registered

# Arguments of a tokenizer's `apply_chat_template` that decide what it returns.
_TEMPLATE_ARGUMENTS = frozenset(
    (
        "conversation", "tokenize", "add_generation_prompt", "continue_final_message", "return_dict",
        "return_tensors", "return_assistant_tokens_mask", "padding", "truncation", "max_length",
        "tokenizer_kwargs", "chat_template",
    )
)  # fmt: skip
_JINJA = re.compile(r"\{%|\{\{-?\s[^{}]*\}\}|\{\{[^{}]*\|[^{}]*\}\}")  # Jinja syntax
_FUNCTION_PATH = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")  # module:name
# Endings of the files that `grpo_dist.data.files` reads; .gz may follow a text file's ending.
TEXT_FILES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
DATA_FILES = (*TEXT_FILES, ".parquet", ".arrow")
_SLICE = re.compile(r"[\[\](+]")


def data_ending(path: str | Path) -> str:
    """Return the ending that determines how a data file is read; "" for other files.

    set.parquet -> .parquet, set.jsonl.gz -> .jsonl, openai/gsm8k-v1.5 -> ""
    """
    plain = PurePath(str(path).removesuffix(".gz"))
    endings = TEXT_FILES if str(path).endswith(".gz") else DATA_FILES
    return plain.suffix if plain.suffix in endings else ""


def _check_date(value: str) -> str:
    try:
        return date.fromisoformat(value).isoformat()
    except ValueError:
        raise ValueError(f"{value!r} is no date; expected year-month-day, e.g. 2026-07-31") from None


def _read_chat_template(value: str) -> str:
    """Return the text of a chat template: ``value``, or the content of the file that it names."""
    if "{{" in value or "{%" in value:
        return value
    try:
        text = expanded(value).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{value[:200]!r} cannot be read ({error}); expected a file with a chat template in Jinja, or "
            "its text"
        ) from error
    if "{{" not in text and "{%" not in text:
        raise ValueError(
            f"{value} is no chat template: it has neither {{{{ nor {{% of Jinja; name another file"
        )
    return text


class ModelConfig(Section):
    """The trained model and its format."""

    path: str = Field(
        description="local directory, hub id, `RUN@latest` or `RUN@STEP`, `demo:<name>`, or"
        " `random:<config.json>` for random weights"
    )
    revision: str | None = Field(None, description="branch, tag or commit of a hub model")
    adapter: str | None = Field(
        None,
        description="directory or hub id of peft's LoRA adapter to start from: trained on with "
        "`policy.lora`, else merged",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="auto: bfloat16 where the accelerator supports it, else float32"
    )
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = Field(
        "auto", description="attention implementation of the trainer"
    )
    kernels: Literal["auto", "torch", "liger"] = Field(
        "auto",
        description="norms, rotary positions and gated activations; liger: Triton kernels, on GPUs; auto: "
        "these for tested models, unless `policy.compile`",
    )
    packing: bool = Field(
        True,
        description="rows without padding, shared prompts computed once, unless the model needs padded "
        "rows (linear attention, Mamba)",
    )
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward pass")
    trust_remote_code: bool = Field(False, description="run Python code that ships with the model")
    chat_template: Annotated[str, AfterValidator(_read_chat_template)] | None = Field(
        None,
        description="chat template: a file, or its text in Jinja; checkpoints and exports have it; null: "
        "the model's",
    )
    max_length: PositiveInt | None = Field(
        None,
        description="longest prompt + completion, tokens; null: data.max_prompt_tokens + the longest "
        "completion",
    )


class FewShotMessage(Section):
    """A message of an example in every prompt."""

    role: Literal["user", "assistant"] = Field(description="user first, then alternating")
    content: str = Field(description="text of the message")


# Keys that define how a row becomes a prompt; the values in `data` are the defaults for its sources.
PROMPT_KEYS = ("template", "system_prompt", "instruction", "few_shot", "prefill")


class DataSourceConfig(Section):
    """A source of problems and answers."""

    path: str | None = Field(
        None,
        description="data file, directory, data set of `save_to_disk`, hub id, `demo:<name>`, "
        "`reasoning_gym:<task>`, or user-supplied `my_module:rows`; null: the environment has the problems",
    )
    split: str = Field(
        "train",
        description="split of the data set, if it has several, or a part: `train[:5%]`, `train[100:]+test`",
    )
    name: str | None = Field(
        None,
        pattern="^[^/]+$",
        description="label in metrics and samples; null: the file's or data set's name",
    )
    subset: str | None = Field(None, description="configuration name of a hub data set or data set directory")
    problem_column: str = Field(
        "problem",
        description="column with the problem: text or chat messages; dots lead into nested columns: "
        "`messages.0.content`",
    )
    problem_template: str | None = Field(
        None,
        description="text of the problem with {columns}, instead of problem_column: `Make {target} of "
        "{nums}.`",
    )
    template: str | None = Field(None, description="overrides `data.template`")
    system_prompt: str | None = Field(None, description="overrides `data.system_prompt`; empty: none")
    instruction: str | None = Field(None, description="overrides `data.instruction`; empty: none")
    few_shot: tuple[FewShotMessage, ...] | None = Field(
        None, description="overrides `data.few_shot`; empty: none"
    )
    prefill: str | None = Field(None, description="overrides `data.prefill`; empty: none")
    system_column: str | None = Field(
        None, description="column with the system prompt of a row; empty there: data.system_prompt"
    )
    history_column: str | None = Field(
        None, description="column with the turns before the problem, pairs of question and answer (ms-swift)"
    )
    answer_column: str = Field(
        "answer",
        description="column with the answer, or text that ends with it",
    )
    answer_pattern: str | None = Field(None, description="regular expression; its group 1 is the answer")
    multiple_answers: Literal["any", "all"] = Field(
        "any", description="list of answers: any of them is right, or all together are the answer"
    )
    columns: tuple[str, ...] = Field(
        (),
        description="further columns passed to rewards; a nested one, `extra_info.index`, is the "
        "argument `index`",
    )
    weight: PositiveFloat | None = Field(
        None,
        description="training: share of the prompts drawn from this source; null: by its number of prompts",
    )
    temperature: Temperature | None = Field(
        None, description="training: sampling temperature of this source; null: sampling.temperature"
    )
    max_rows: PositiveInt | None = Field(None, description="rows to use, from the start; null: all")
    kwargs: dict[str, Any] = Field(
        {},
        description="settings of a `reasoning_gym` task, e.g. {max_terms: 3, seed: 1}, or arguments of a "
        "user-supplied source",
    )
    environment: EnvironmentName | None = Field(
        None,
        description="`none`, `python`, `calculator`, `my_module:Class`, {program: my_agent.py}, "
        "`verifiers:<environment>`, `reasoning_gym:<task>` or `openenv:<url>`; null: `data.environment`",
    )
    environment_kwargs: dict[str, Any] = Field({}, description="arguments of the environment")
    algorithm: SourceAlgorithmConfig | None = Field(
        None, description="training: advantage, loss and weight of the KL term of this source's samples"
    )

    @property
    def label(self) -> str:
        """The source's name in metrics, samples and other sections."""
        if self.name:
            return self.name
        if self.path is None:  # the environment's problems: last part of its name, without invalid characters
            return (self.environment or "environment").rpartition(":")[2].rstrip("/").rpartition("/")[2]
        kind, _, rest = self.path.partition(":")
        if kind in ("demo", "reasoning_gym") or self.is_own:
            return rest
        name = Path(self.path).name  # a hub id may end in -v1.5
        ending = data_ending(name)
        return name.removesuffix(".gz").removesuffix(ending) if ending else name

    @property
    def is_generated_by_reasoning_gym(self) -> bool:
        return self.path is not None and self.path.startswith("reasoning_gym:")

    @property
    def is_own(self) -> bool:
        """Whether the path names a function: ``module:name``, or a function that a package registers. A path
        that exists is always a file or directory.
        """
        if self.path is None or os.path.exists(expanded(self.path)):  # False for a name that is too long
            return False
        if self.path.partition(":")[0] in ("demo", "reasoning_gym"):
            return False
        if _FUNCTION_PATH.fullmatch(self.path):
            return True
        return self.path.isidentifier() and self.path in registered(SOURCE)

    def _contradictions(self) -> Iterator[str]:
        if self.kwargs and not self.is_own and not self.is_generated_by_reasoning_gym:
            yield (
                f"kwargs = {self.kwargs} are settings of a path `reasoning_gym:<task>`, but path = "
                f"{self.path}; remove them (an environment has `environment_kwargs`)"
            )
        if _SLICE.search(self.split) and (
            self.path is None or self.is_own or self.is_generated_by_reasoning_gym
        ):
            yield (
                f"split = {self.split} takes a part of a file or data set, but path = {self.path} generates "
                "its rows; limit them with `max_rows`, or by an argument of your function"
            )
        by_argument: dict[str, str] = {}  # column by the argument name in reward functions
        for column in self.columns:
            last = column.rpartition(".")[2]
            if by_argument.setdefault(last, column) != column and last.isidentifier():
                yield (
                    f"columns = {by_argument[last]} and {column} would both be `{last}` to rewards; keep one "
                    "of them, or name an object that has it, which is passed whole"
                )
        if self.problem_template is not None and self.problem_column != "problem":
            yield f"problem_template replaces problem_column = {self.problem_column}; remove one of them"
        yield from _prompt_problems(self.template, self.few_shot or ())
        if "size" in self.kwargs and not self.is_own:
            yield f"kwargs.size = {self.kwargs['size']}: use `max_rows` instead"
        if self.answer_pattern is None:
            return
        try:
            groups = regex.compile(self.answer_pattern).groups
        except (regex.error, OverflowError, RecursionError) as error:
            yield f"answer_pattern {self.answer_pattern[:200]!r} is not a regular expression: {error}"
            return
        if groups < 1:
            yield f"answer_pattern {self.answer_pattern!r} has no group; put ( ) around the answer"


def _prompt_problems(template: str | None, few_shot: tuple[FewShotMessage, ...]) -> Iterator[str]:
    if template and _JINJA.search(template):
        yield (
            f"template = {template[:80]!r} is written in Jinja; expected the text of the user's message with "
            "{problem} and other {columns} (Jinja is for `model.chat_template`)"
        )
    if template and not names_in(template):
        yield (
            f"template = {template[:80]!r} names no column, so all prompts would be the same; write "
            "{problem} where the problem belongs"
        )
    for number, message in enumerate(few_shot):
        if message.role != ("user", "assistant")[number % 2]:
            yield f"few_shot.{number}.role = {message.role}; expected user and assistant in turn, user first"
    if len(few_shot) % 2:
        yield "few_shot ends with a user message; expected the assistant's answer after it"


DropSolved = Annotated[
    Annotated[float, Field(gt=0, le=1)] | None,
    Field(
        description="share of right samples from which later epochs drop a prompt (ScaleRL: 0.9); null: never"
    ),
]


class EpochsOrderConfig(Choice):
    """Shuffled epochs."""

    name: Literal["epochs"] = "epochs"
    drop_solved: DropSolved = None


class LengthOrderConfig(Choice):
    """Epochs in which prompts with long answers share steps."""

    name: Literal["length"] = "length"
    window: PositiveInt = Field(8, description="steps of an epoch that are sorted by expected length")
    drop_solved: DropSolved = None


class PassRateOrderConfig(Choice):
    """Prompts with an intermediate pass rate are drawn more often."""

    name: Literal["pass_rate"] = "pass_rate"


class PoolsOrderConfig(Choice):
    """Prompts are drawn where the policy can learn now, by Thompson sampling of pools and prompts."""

    name: Literal["pools"] = "pools"
    half_life: PositiveFloat = Field(
        10.0, description="steps after which an outcome counts half, since the policy changes"
    )


class UserOrderConfig(Choice):
    """A user-supplied function."""

    name: OrderName
    kwargs: dict[str, Any] = Field({}, description="arguments of the function")


class DataConfig(Section):
    """Prompts for training and evaluation."""

    train: tuple[DataSourceConfig, ...] = Field(
        min_length=1, description="sources of training prompts, concatenated"
    )
    eval: tuple[DataSourceConfig, ...] = Field((), description="evaluation sets, each with separate metrics")
    environment: EnvironmentName = Field(
        "none", description="environment of sources that set none; `none`: one completion per sample"
    )
    system_prompt: str | None = Field(
        None, description="text before every problem: the chat template's system message, or a first line"
    )
    template: str | None = Field(
        None,
        description="text of the user's message with {problem} and other {columns} of the row; `{{x}}` is "
        "the text {x}; null: the problem",
    )
    instruction: str | None = Field(None, description="appended to every problem")
    few_shot: tuple[FewShotMessage, ...] = Field(
        (), description="examples before every problem, as messages of user and assistant in turn"
    )
    prefill: str | None = Field(
        None,
        description="start of every answer and of every policy message of an episode, e.g. `<think>\\n`; "
        "its tokens are never trained",
    )
    prefill_as: Literal["prompt", "completion"] = Field(
        "prompt",
        description="whether rewards, sample files and evaluations see the prefill (completion) or what "
        "follows it (prompt)",
    )
    chat_template: Literal["model", "none"] = Field(
        "model", description="model: the model's, or `model.chat_template`; none: the plain problem text"
    )
    template_kwargs: dict[str, Any] = Field({}, description="further arguments of the chat template")
    template_date: Annotated[str, AfterValidator(_check_date)] | None = Field(
        None,
        description="date that a chat template with `strftime_now` writes, as 2026-07-31; null: the day of "
        "the start",
    )
    max_prompt_tokens: PositiveInt = Field(512, description="longest prompt, including the chat template")
    overlong: Literal["refuse", "drop"] = Field("refuse", description="what to do with longer prompts")
    order: Annotated[
        EpochsOrderConfig | LengthOrderConfig | PassRateOrderConfig | PoolsOrderConfig | UserOrderConfig,
        Tagged(),
    ] = Field(EpochsOrderConfig(), description="order of the training prompts")
    pools: str | None = Field(
        None,
        description="what divides prompts into pools: `source` or a column; null: no `pool/...` metrics, "
        "and `source` for the order pools",
    )
    deduplicate: bool = Field(
        False,
        description="keep only the first row of each problem, in training and in each evaluation set",
    )
    overlap: Literal["refuse", "warn"] = Field(
        "warn", description="what to do with evaluation problems found in the training set"
    )

    @property
    def day(self) -> date | None:
        """The date that chat templates write; None: today."""
        return None if self.template_date is None else date.fromisoformat(self.template_date)

    @property
    def weights(self) -> dict[str, float]:
        """The share of prompts from each source, by label; empty: proportional to its number of prompts."""
        weights = {s.label: s.weight for s in self.train if s.weight is not None}
        return {name: weight / sum(weights.values()) for name, weight in weights.items()}

    @property
    def temperatures(self) -> dict[str, float]:
        """The sampling temperatures that sources set, by label."""
        return {s.label: s.temperature for s in self.train if s.temperature is not None}

    @property
    def user_components(self) -> tuple[UserComponent, ...]:
        """The user-supplied data sources, order, and algorithm parts of sources."""
        sources = [s for s in (*self.train, *self.eval) if s.is_own]
        components = [UserComponent(SOURCE, str(s.path), SOURCE.key, s.kwargs) for s in sources]
        if isinstance(self.order, UserOrderConfig):
            components.append(UserComponent(ORDER, self.order.name, ORDER.key, self.order.kwargs))
        for number, source in enumerate(self.train):
            parts = source.algorithm.over(AlgorithmConfig()).user_components if source.algorithm else ()
            components += [replace(part, key=f"data.train.{number}.{part.key}") for part in parts]
        return tuple(components)

    @property
    def drop_solved(self) -> float | None:
        """The share of right samples from which later epochs drop a prompt; None: never."""
        order = self.order
        return order.drop_solved if isinstance(order, EpochsOrderConfig | LengthOrderConfig) else None

    @property
    def pools_by(self) -> str | None:
        """What divides prompts into pools; None: nothing reads it."""
        return self.pools or ("source" if isinstance(self.order, PoolsOrderConfig) else None)

    def _contradictions(self) -> Iterator[str]:
        yield from self._check_run_settings()
        if self.drop_solved is not None and self.weights:
            yield (
                f"order.drop_solved = {self.drop_solved:g} drops prompts, so sources with a `weight` could "
                "not supply their shares; remove it, or the weights"
            )

    def _check_run_settings(self) -> Iterator[str]:
        if reserved := sorted(_TEMPLATE_ARGUMENTS & self.template_kwargs.keys()):
            yield (
                f"template_kwargs.{reserved[0]} = {self.template_kwargs[reserved[0]]} is no variable of the "
                "chat template, and the run sets it; remove it"
            )
        yield from _prompt_problems(self.template, self.few_shot)

    def resolve_prompts(self, sources: Sequence[DataSourceConfig]) -> tuple[DataSourceConfig, ...]:
        """Return ``sources`` with this section's values of the prompt keys that they do not set."""
        return tuple(
            source.model_copy(
                update={key: getattr(self, key) for key in PROMPT_KEYS if getattr(source, key) is None}
            )
            for source in sources
        )

    def environment_of(self, source: DataSourceConfig) -> str | None:
        """Return the environment of a source; None: it has none."""
        name = source.environment or self.environment
        return None if name == "none" else name


class LaunchOrder(Choice):
    """A step takes the next groups in the order of their launch, the same in every run of a seed."""

    name: Literal["launched"] = "launched"


class CompletionOrder(Choice):
    """A step takes the groups that finish first; later steps take the others, and wait for them within
    `max_staleness`.
    """

    name: Literal["completion"] = "completion"
    oversample: Annotated[float, Field(ge=1)] | None = Field(
        None,
        description="groups in flight per group that a step takes, at most 1 + max_staleness; null: 1 + "
        "max_staleness / 2",
    )


class BatchConfig(Section):
    """Batch sizes: a step draws prompts_per_step * samples_per_prompt samples."""

    prompts_per_step: PositiveInt = Field(16, description="prompts, each with a group of samples")
    samples_per_prompt: PositiveInt = Field(
        8,
        description="group size G; 1: for flash_reinforce, reinforce_pp, remax and process",
    )
    order: Annotated[LaunchOrder | CompletionOrder, Tagged()] = Field(
        LaunchOrder(), description="which groups a step takes"
    )
    updates_per_step: PositiveInt = Field(1, description="optimiser updates per step; 1 is on-policy")
    epochs_per_batch: PositiveInt = Field(1, description="passes over the samples of a step")
    shuffle_epochs: bool = Field(
        False,
        description="reassign the groups of a step to its updates in every later epoch",
    )
    micro_batch_tokens: PositiveInt | None = Field(
        None, description="tokens of a rank in one forward pass; null: 16384 on a GPU, 4096 elsewhere"
    )

    @property
    def least_samples(self) -> int:
        """Fewest successful samples of a group: half, at least 2. With fewer the group is sampled again."""
        return min(self.samples_per_prompt, max(2, -(-self.samples_per_prompt // 2)))


class NoDynamicSampling(Choice):
    """Zero-variance groups stay in their step."""

    tag = "enabled"
    enabled: Literal[False] = False


class DynamicSamplingConfig(Choice):
    """DAPO: as soon as a group has zero variance, or a mean reward outside of a range, a group of an extra
    prompt, the next of the epoch, replaces it.
    """

    tag = "enabled"
    enabled: Literal[True] = True
    metric: str | None = Field(
        None,
        description="metric that must differ within a group: the name of a reward, or `accuracy`; null: what "
        "the estimator uses",
    )
    mean_low: float | None = Field(
        None,
        description="mean of `metric`, or of the total reward, that a group must be above; null: any",
    )
    mean_high: float | None = Field(
        None, description="mean of `metric`, or of the total reward, that a group must be below; null: any"
    )
    max_extra_prompts: PositiveInt | None = Field(
        None,
        description="most extra prompts per step; null: three times batch.prompts_per_step, less with "
        "small data",
    )
    oversample: Annotated[float, Field(ge=1)] = Field(
        1.0,
        description="extra prompts launched per missing group once all groups of the step's own prompts are "
        "scored",
    )

    def _contradictions(self) -> Iterator[str]:
        if self.mean_low is not None and self.mean_high is not None and self.mean_low >= self.mean_high:
            yield f"mean_low = {self.mean_low:g} must be below mean_high = {self.mean_high:g}"


DynamicSampling = Annotated[NoDynamicSampling | DynamicSamplingConfig, Tagged()]
