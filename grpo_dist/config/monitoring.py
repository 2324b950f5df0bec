"""Evaluation, health bounds, checkpoints, tracking, profiles and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from grpo_dist.config.base import (
    TOP_K,
    TOP_P,
    Choice,
    Count,
    EvaluationTemperature,
    Fraction,
    Section,
    Tagged,
    TopK,
    TopP,
    repeated,
)
from grpo_dist.plugins.user_code import METRIC, SINK, MetricName, SinkName, UserComponent


class EvaluationConfig(Section):
    """Evaluation on `data.eval`."""

    every: Count = Field(0, description="steps between evaluations; 0: none during training")
    before: bool = Field(True, description="evaluate the initial weights before the first step")
    after: bool = Field(True, description="evaluate the exported weights on a new engine after the last step")
    samples_per_prompt: PositiveInt = Field(1, description="samples per problem")
    temperature: EvaluationTemperature = Field(1.0, description="sampling temperature; 0: greedy")
    top_p: TopP = Field(1.0, description=TOP_P)
    top_k: TopK = Field(0, description=TOP_K)
    max_new_tokens: PositiveInt | None = Field(None, description="null: the largest sampling.max_new_tokens")
    k: tuple[PositiveInt, ...] = Field((1,), description="pass@k to report; each at most samples_per_prompt")
    num_workers: Count = Field(
        0,
        description="separate engines for evaluation while training continues; 0: training waits, and "
        "evaluation uses its engines",
    )

    def _contradictions(self) -> Iterator[str]:
        if max(self.k, default=1) > self.samples_per_prompt:
            yield (
                f"k = {list(self.k)} has a value above samples_per_prompt = {self.samples_per_prompt}; "
                "raise samples_per_prompt or lower k"
            )


class HealthAction(Choice):
    """No rollback."""

    tag = "kind"
    kind: Literal["skip", "warn", "stop"] = "skip"


class RollbackAction(Choice):
    """The run resumes from the last checkpoint, without the batch."""

    tag = "kind"
    kind: Literal["rollback"] = "rollback"
    max_rollbacks: PositiveInt = Field(3, description="most rollbacks of a run; then it stops")


class HealthConfig(Section):
    """Bounds of a step's metrics, and the action if a step exceeds one; null: no bound."""

    action: Annotated[HealthAction | RollbackAction, Tagged()] = Field(
        HealthAction(),
        description="for a step that exceeds a bound, whose batch is kept. skip: no update; warn: trained "
        "on; stop: exit code 3; rollback: resume from the last checkpoint without it",
    )
    min_signal_groups: Count = Field(
        1,
        description="skip a step with fewer groups of unequal rewards; 0: never. Ignored where equal "
        "rewards teach something, e.g. with teachers",
    )
    skipped_steps_above: PositiveInt | None = Field(
        10,
        description="most consecutive steps without an update (not finite, or beyond a bound); above "
        "it the run ends",
    )
    unscored_steps_above: Count | None = Field(
        0,
        description="most consecutive steps without a scored sample; above it the run ends for every action",
    )
    reward_below_share: Fraction | None = Field(
        None, description="mean reward as a share of the run's best (if that is above 0), e.g. 0.5"
    )
    entropy_below: PositiveFloat | None = Field(None, description="entropy of the policy, nats per token")
    truncated_above: Fraction | None = Field(None, description="share of truncated completions")
    degenerate_above: Fraction | None = Field(
        None,
        description="share of completions that end in a loop or are unreadable, e.g. 0.5. Not for "
        "random weights",
    )
    mismatch_above: PositiveFloat | None = Field(
        1.0, description="mean difference of log-probs between engine and trainer, nats"
    )
    kl_above: PositiveFloat | None = Field(10.0, description="`ref/kl`, nats per token")
    grad_norm_spike: Annotated[float, Field(gt=1)] | None = Field(
        None,
        description="gradient norm, as a multiple of its median over the last 20 steps that trained, e.g. 20",
    )


class CheckpointConfig(Section):
    """Checkpoints, resume and export."""

    every: Count = Field(20, description="steps between checkpoints; 0: only the last")
    every_minutes: PositiveFloat | None = Field(
        None, description="minutes after which a checkpoint is also due; null: only steps count"
    )
    keep: PositiveInt = Field(2, description="newest checkpoints kept")
    keep_best: Annotated[str, Field(pattern="^eval/")] | None = Field(
        None,
        description="metric of `evaluation`, e.g. eval/SET/pass@1: the checkpoint with its highest value is "
        "also written and kept",
    )
    patience: PositiveInt | None = Field(
        None,
        description="the run ends after this many evaluations without a new highest `keep_best`; null: never",
    )
    target: float | None = Field(
        None, description="the run ends once `keep_best` is at least this; null: never"
    )
    resume: Literal["auto", "never"] = Field(
        "auto", description="auto: resume from the newest undamaged checkpoint, if any"
    )
    changed_code: Literal["refuse", "warn"] = Field(
        "refuse",
        description="what to do on resume when user code (`code_paths`) differs from the checkpoint's",
    )
    background: bool = Field(
        True, description="write checkpoints while training continues, from a copy in each rank's host memory"
    )
    grace_s: PositiveFloat = Field(
        60.0, description="time to finish the step and save a checkpoint after SIGTERM"
    )
    export: bool = Field(True, description="write the trained model in Hugging Face format at the end")


class MetricConfig(Section):
    """A user-supplied metric, logged as `user/<name>` after each step; `user/<name>/<key>` for each value of
    a mapping.
    """

    name: str = Field(
        "",
        pattern="^[^/]*$",
        description="name in the metrics; empty: the function's, without its module",
    )
    function: MetricName = Field(description="`module:name`, or a name that a package registers")
    kwargs: dict[str, Any] = Field({}, description="its arguments")

    @property
    def label(self) -> str:
        """The name in the metrics."""
        return self.name or self.function.rpartition(":")[2]


class SinkConfig(Section):
    """A user-supplied sink, which receives all metrics and some tables of samples."""

    function: SinkName = Field(description="class `module:name`, or a name that a package registers")
    kwargs: dict[str, Any] = Field({}, description="its arguments")


class TrackingConfig(Section):
    """Outputs of metrics and samples other than `metrics.jsonl`: see `grpo_dist/observe/README.md`."""

    console: bool = Field(True, description="print a line per step in the terminal")
    tensorboard: bool = Field(True, description="write `tensorboard/` in the run directory")
    wandb: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="project at Weights & Biases, offline without an API key; null: not used",
    )
    swanlab: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="project at SwanLab, offline without SWANLAB_API_KEY or a login; null: not used",
    )
    trackio: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="project of Trackio, on this machine (`trackio show`); null: not used"
    )
    metrics: tuple[MetricConfig, ...] = Field((), description="user-supplied metrics")
    sinks: tuple[SinkConfig, ...] = Field((), description="user-supplied sinks")
    samples: bool = Field(
        True, description="write every completion with its rewards, one Parquet file per step"
    )
    token_values_every: Count = Field(
        10,
        description="steps between samples with each token's advantage and log-probs; 0: none",
    )

    def _contradictions(self) -> Iterator[str]:
        labels = [metric.label for metric in self.metrics]
        for label in repeated(labels):
            yield f"metrics: two have the name {label}, and each would overwrite the other; set `name` on one"

    @property
    def user_components(self) -> tuple[UserComponent, ...]:
        """The user-supplied metrics and sinks."""
        metrics = [UserComponent(METRIC, m.function, METRIC.key, m.kwargs) for m in self.metrics]
        return (*metrics, *(UserComponent(SINK, s.function, SINK.key, s.kwargs) for s in self.sinks))


class ProfileConfig(Section):
    """Profiles of chosen steps, with the shapes of each operator's inputs, written to `profile` in the run
    directory.
    """

    steps: tuple[PositiveInt, ...] = Field((), description="steps to trace on every rank, e.g. [3, 4]")


class NaturalLengths(Choice):
    """The model ends its completions."""

    tag = "kind"
    kind: Literal["natural"] = "natural"


class FixedLengths(Choice):
    """One length for all completions, or for each action of an episode."""

    tag = "kind"
    kind: Literal["fixed"] = "fixed"
    tokens: PositiveInt | None = Field(None, description="the length; null: sampling.max_new_tokens")


class LognormalLengths(Choice):
    """Log-normal lengths of completions, or of an episode's actions, cut off at `sampling.max_new_tokens`."""

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
