"""A whole run, and what its sections must agree on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field, PositiveInt, model_validator

from grpo_dist.config.algorithm import AlgorithmConfig
from grpo_dist.config.base import Count, Section
from grpo_dist.config.bench import BenchConfig
from grpo_dist.config.checks import contradictions
from grpo_dist.config.cluster import ClusterConfig
from grpo_dist.config.data import BatchConfig, DataConfig, DynamicSamplingConfig, ModelConfig, SamplingConfig
from grpo_dist.config.monitoring import (
    CheckpointConfig,
    EvaluationConfig,
    HealthConfig,
    ProfileConfig,
    TrackingConfig,
)
from grpo_dist.config.rewards import RewardsConfig
from grpo_dist.config.stages import RejectionConfig, SFTConfig
from grpo_dist.config.workers import PolicyConfig, ReferenceConfig, RolloutConfig, WeightSyncConfig


class Config(Section):
    """A whole run."""

    name: str = Field(
        "run",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="of the run and of its directory in `output_dir`",
    )
    output_dir: str = Field("runs", description="where run directories are made")
    seed: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        0, description="of the prompt order, of every sample, and of models this project makes"
    )
    steps: PositiveInt = Field(100, description="training steps of the whole run")
    max_staleness: Count = Field(
        0, description="0: synchronous on-policy; n: sampling runs up to n steps ahead"
    )
    model: ModelConfig
    data: DataConfig
    batch: BatchConfig = BatchConfig()
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    sampling: SamplingConfig = SamplingConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rewards: RewardsConfig = RewardsConfig()
    rollout: RolloutConfig = RolloutConfig()
    reference: ReferenceConfig = ReferenceConfig()
    policy: PolicyConfig = PolicyConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    health: HealthConfig = HealthConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    profile: ProfileConfig = ProfileConfig()
    cluster: ClusterConfig = ClusterConfig()
    bench: BenchConfig = BenchConfig()
    sft: SFTConfig | None = Field(
        None, description="the supervised cold start that `model.path: sft` refers to"
    )
    rejection: RejectionConfig = Field(
        RejectionConfig(), description="how `grpo-dist sample` draws and keeps samples"
    )

    @property
    def needs_reference(self) -> bool:
        return self.algorithm.kl.coef > 0

    @property
    def samples_in_flight(self) -> int:
        """Samples that may be drawn at once in training, on all engines together."""
        step = self.batch.prompts_per_step * self.batch.samples_per_prompt
        return step * (1 + self.max_staleness)

    @property
    def total_updates(self) -> int:
        """Optimiser updates of the whole run."""
        return self.steps * self.batch.updates_per_step * self.batch.epochs_per_batch

    @property
    def max_length(self) -> int:
        """Longest prompt + completion, tokens."""
        return self.model.max_length or self.data.max_prompt_tokens + self._longest_completion

    @property
    def _longest_completion(self) -> int:
        others = (self.evaluation.max_new_tokens, self.rejection.max_new_tokens)
        return max(self.sampling.max_new_tokens, *(tokens or 0 for tokens in others))

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        """One message for all that contradicts."""
        checks = (_batch_divides, _lengths_fit, _bench_lengths_fit, contradictions, _sft_is_there)
        if problems := [problem for check in checks for problem in check(self)]:
            raise ValueError("; ".join(problems))
        return self


def _batch_divides(config: Config) -> Iterator[str]:
    b, ranks = config.batch, config.policy.replicas
    if b.prompts_per_step % b.updates_per_step:
        near = _divisors_near(b.prompts_per_step, b.updates_per_step)
        yield (
            f"`batch.prompts_per_step` = {b.prompts_per_step} must be divisible by "
            f"`batch.updates_per_step` = {b.updates_per_step}; use {near}"
        )
        return
    samples = b.prompts_per_step * b.samples_per_prompt // b.updates_per_step
    if samples % ranks:
        per_update = " / `batch.updates_per_step`" if b.updates_per_step > 1 else ""
        shared = config.policy.sequence_parallel
        per_sequence = f" / `policy.sequence_parallel` = {shared}" if shared > 1 else ""
        yield (
            f"`batch.prompts_per_step` * `batch.samples_per_prompt`{per_update} = {samples} must be "
            f"divisible by `policy.num_workers` = {config.policy.num_workers}{per_sequence}; use "
            f"{_divisors_near(samples, ranks)}{' times that' if per_sequence else ''}"
        )


def _lengths_fit(config: Config) -> Iterator[str]:
    needed = config.data.max_prompt_tokens + config._longest_completion
    if config.max_length < needed:
        yield (
            f"`model.max_length` = {config.model.max_length} is below `data.max_prompt_tokens` + the "
            f"longest completion = {needed}; raise the one or lower the others"
        )


def _bench_lengths_fit(config: Config) -> Iterator[str]:
    tokens = config.bench.lengths.tokens or 0
    if tokens > config.sampling.max_new_tokens:
        yield (
            f"`bench.lengths.tokens` = {tokens} is above `sampling.max_new_tokens` = "
            f"{config.sampling.max_new_tokens}; lower the one or raise the other"
        )


def _sft_is_there(config: Config) -> Iterator[str]:
    if config.model.path == "sft" and config.sft is None:
        yield "`model.path` = sft needs an `sft` section that says how that model is made"


def _divisors_near(total: int, wanted: int) -> str:
    """The divisors of ``total`` on both sides of ``wanted``, for a message: (512, 3) -> "2 or 4"."""
    below = [d for d in range(1, wanted) if total % d == 0]
    above = [d for d in range(wanted + 1, total + 1) if total % d == 0]
    return " or ".join(str(d) for d in below[-1:] + above[:1])
