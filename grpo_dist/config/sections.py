"""All sections of a run, and values derived from several of them. Checks across sections are in `checks`,
which reads this class; `root.Config` runs them.
"""

from __future__ import annotations

from pydantic import Field, PositiveInt

from grpo_dist.config.algorithm import AlgorithmConfig
from grpo_dist.config.base import Count, DirectoryName, Section, Seed
from grpo_dist.config.bench import BenchConfig
from grpo_dist.config.cluster import ClusterConfig
from grpo_dist.config.data import BatchConfig, DataConfig, DynamicSamplingConfig, ModelConfig
from grpo_dist.config.distillation import DemonstrationStreamConfig, DistillationConfig
from grpo_dist.config.environments import EnvironmentsConfig
from grpo_dist.config.monitoring import (
    CheckpointConfig,
    EvaluationConfig,
    HealthConfig,
    ProfileConfig,
    TrackingConfig,
)
from grpo_dist.config.rewards import RewardsConfig
from grpo_dist.config.sampling import SamplingConfig
from grpo_dist.config.stages import RejectionConfig, SFTConfig
from grpo_dist.config.workers import PolicyConfig, ReferenceConfig, RolloutConfig, WeightSyncConfig


class Sections(Section):
    """The fields of `Config`."""

    name: DirectoryName = Field("run", description="name of the run and of its directory in `output_dir`")
    output_dir: str = Field("runs", description="directory that contains the run directories")
    seed: Seed = Field(0, description="random seed of the prompt order, all samples, and demo models")
    steps: PositiveInt = Field(100, description="training steps of the whole run")
    max_staleness: Count = Field(
        0, description="0: synchronous, on-policy; n: sampling runs up to n steps ahead"
    )
    model: ModelConfig
    data: DataConfig
    batch: BatchConfig = BatchConfig()
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    sampling: SamplingConfig = SamplingConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    distillation: DistillationConfig = DistillationConfig()
    demonstrations: DemonstrationStreamConfig | None = Field(
        None, description="demonstrations beside the samples of every step; null: none"
    )
    rewards: RewardsConfig = RewardsConfig()
    environments: EnvironmentsConfig = EnvironmentsConfig()
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
        RejectionConfig(), description="how `grpo-dist sample` draws and selects samples"
    )

    @property
    def has_kl_term(self) -> bool:
        """Whether the policy is held near the reference."""
        return self.algorithm.kl.coef > 0

    @property
    def needs_reference(self) -> bool:
        """Whether anything asks for the reference's log-probs: the KL term, or a teacher."""
        return self.has_kl_term or not all(t.has_workers for t in self.distillation.teachers)

    @property
    def has_environments(self) -> bool:
        """Whether any source of problems has an environment."""
        return bool(self.environment_names)

    @property
    def environment_names(self) -> tuple[str, ...]:
        """The environments of all sources of problems, each once."""
        names = (self.data.environment_of(source) for source in (*self.data.train, *self.data.eval))
        return tuple(dict.fromkeys(name for name in names if name is not None))

    @property
    def is_supervised(self) -> bool:
        """Whether the ranks minimise the cross-entropy of demonstrations; they are then the only workers."""
        return False

    @property
    def samples_in_flight(self) -> int:
        """Most training samples in flight at once, over all engines."""
        step = self.batch.prompts_per_step * self.batch.samples_per_prompt
        return step * (1 + self.max_staleness)

    @property
    def total_updates(self) -> int:
        """Optimiser updates of the whole run."""
        return self.steps * self.batch.updates_per_step * self.batch.epochs_per_batch

    @property
    def max_length(self) -> int:
        """Longest prompt + completion, tokens."""
        return self.model.max_length or self.data.max_prompt_tokens + self.longest_completion

    @property
    def longest_completion(self) -> int:
        """Most tokens of a completion in training, evaluation and rejection sampling."""
        others = (self.evaluation.max_new_tokens, self.rejection.max_new_tokens)
        return max(self.sampling.longest, *(tokens or 0 for tokens in others))
