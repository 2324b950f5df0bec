"""What a run tells of itself: evaluations, health, checkpoints, trackers, profiles."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from grpo_dist.config.base import Count, EvaluationTemperature, Fraction, Section


class EvaluationConfig(Section):
    """Sampling of `data.eval`."""

    every: Count = Field(0, description="steps between evaluations; 0: none during training")
    before: bool = Field(True, description="before the first step, with the weights the run starts from")
    after: bool = Field(True, description="a fresh engine samples the exported weights")
    samples_per_prompt: PositiveInt = Field(1, description="samples of each problem")
    temperature: EvaluationTemperature = Field(1.0, description="of its samples; 0: greedy")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="draw from the likeliest tokens that have this share together; 1: from all"
    )
    top_k: Count = Field(0, description="draw from the so many likeliest tokens; 0: from all")
    max_new_tokens: PositiveInt | None = Field(None, description="null: sampling.max_new_tokens")
    k: tuple[PositiveInt, ...] = Field((1,), description="pass@k to report; each at most samples_per_prompt")
    max_prompts: PositiveInt | None = Field(None, description="evaluate on the first so many of each set")

    @model_validator(mode="after")
    def _k_in_range(self) -> EvaluationConfig:
        if max(self.k, default=1) > self.samples_per_prompt:
            raise ValueError(
                f"k = {list(self.k)} asks for more than samples_per_prompt = {self.samples_per_prompt}; "
                "raise samples_per_prompt or lower k"
            )
        return self


class HealthConfig(Section):
    """What makes a step unfit to train on, and bounds of its metrics; null: no bound. Drift of reward,
    entropy, and shares cut off and garbage from what they were in the same run, from its first 5 steps on, is
    warned of without one.
    """

    action: Literal["skip", "warn", "stop", "rollback"] = Field(
        "skip",
        description="when a bound is passed; the batch is kept in any case. skip: it is not trained on, and "
        "the run stops after too many in a row; warn: it is; stop: the run ends with exit code 3; rollback: "
        "the run resumes from its last checkpoint without that batch",
    )
    max_rollbacks: PositiveInt = Field(3, description="of a run; after so many, as stop")
    min_signal_groups: Count = Field(
        1,
        description="a step with fewer groups whose rewards differ is not trained on; 0: all are. Not where "
        "equal rewards have a signal too (remax, gdpo, process, reinforce_pp)",
    )
    skipped_steps_above: PositiveInt | None = Field(
        10,
        description="steps in a row with an update that was not made: a loss or gradient was not finite, "
        "or a bound was passed and the step skipped",
    )
    idle_steps_above: PositiveInt | None = Field(
        50,
        description="steps in a row that trained on no token, after which the run ends whatever the action: "
        "rewards were equal in all groups, or no sample could be scored, or all were cut off and masked",
    )
    reward_below_share: Fraction | None = Field(
        None, description="mean reward, as a share of its greatest so far where that is above 0, e.g. 0.5"
    )
    entropy_below: PositiveFloat | None = Field(None, description="of the policy, nats a token")
    length_above: PositiveFloat | None = Field(None, description="mean completion, tokens")
    truncated_above: Fraction | None = Field(None, description="share of completions that were cut off")
    garbage_above: Fraction | None = Field(
        None,
        description="share of completions that end in a loop or are unreadable, e.g. 0.5. Not for "
        "models with random weights, which say nothing else",
    )
    mismatch_above: PositiveFloat | None = Field(
        1.0, description="mean difference of log-probs between engine and trainer, nats"
    )
    kl_above: PositiveFloat | None = Field(10.0, description="ref/kl, nats a token")
    grad_norm_spike: Annotated[float, Field(gt=1)] | None = Field(
        None, description="gradient norm, as a multiple of its median over the last 20 steps, e.g. 20"
    )


class CheckpointConfig(Section):
    """What is saved, and how a run resumes."""

    every: Count = Field(20, description="steps between checkpoints; 0: only the last")
    keep: PositiveInt = Field(2, description="newest checkpoints kept")
    resume: Literal["auto", "never"] = Field(
        "auto", description="auto: resume from the newest undamaged checkpoint, if any"
    )
    background: bool = Field(
        True, description="written while training continues, from a copy in the host memory of each rank"
    )
    grace_s: PositiveFloat = Field(
        60.0, description="what a run that is asked to end (SIGTERM) has for its step and a checkpoint"
    )
    export: bool = Field(True, description="write the trained model in Hugging Face format at the end")


class WandbConfig(Section):
    """Weights & Biases."""

    enabled: bool = Field(False, description="log to wandb, too")
    project: str = Field("grpo-dist", description="project of the run")
    entity: str | None = Field(None, description="user or team; null: the key's own")
    mode: Literal["auto", "online", "offline"] = Field(
        "auto", description="auto: offline where no key is set, or as set by WANDB_MODE"
    )


class MlflowConfig(Section):
    """MLflow, where it is installed."""

    enabled: bool = Field(False, description="log to MLflow, too")
    uri: str | None = Field(
        None,
        description="its server or store; null: MLFLOW_TRACKING_URI, else `mlflow.db` in `output_dir`",
    )
    experiment: str = Field("grpo-dist", description="experiment of the run")


class TrackingConfig(Section):
    """Where metrics and samples go besides `metrics.jsonl`: `grpo_dist/observe/README.md`."""

    console: bool = Field(True, description="a line a step in the terminal")
    tensorboard: bool = Field(True, description="write `tensorboard/` in the run directory")
    wandb: WandbConfig = WandbConfig()
    mlflow: MlflowConfig = MlflowConfig()
    samples: bool = Field(
        True, description="keep every sampled completion with its rewards, one Parquet file a step"
    )
    token_values_every: Count = Field(
        10,
        description="with the samples of every so many steps keep, for each token, its advantage and its "
        "log-probs under policy and reference; 0: of none",
    )


class ProfileConfig(Section):
    """Of chosen steps; the traces are in the directory `profile` of the run."""

    steps: tuple[PositiveInt, ...] = Field((), description="whose updates every rank traces, e.g. [3, 4]")
    shapes: bool = Field(True, description="with the shapes of what each operator was given")
    memory: bool = Field(False, description="with what each operator allocated and freed")
    stacks: bool = Field(False, description="with the Python stack of each operator, at some cost")
