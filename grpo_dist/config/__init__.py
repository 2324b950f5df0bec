"""The typed configuration tree. Every section is frozen, refuses unknown keys, and configures the component
of the same name.

`config.files.load_config` reads files, defaults, interpolations and command-line overrides. The other modules
define sections, value ranges and checks across sections. The package imports neither torch nor ray, so that
``grpo-dist --help`` starts instantly.
"""

from grpo_dist.config.algorithm import (
    AdaptiveEntropyConfig,
    AlgorithmConfig,
    KLConfig,
)
from grpo_dist.config.base import Count, Fraction, NonNegative, Section
from grpo_dist.config.checks import Config
from grpo_dist.config.cluster import AutoscalingConfig, ClusterConfig, RestartsConfig, TimeoutsConfig
from grpo_dist.config.data import (
    BatchConfig,
    DataConfig,
    DataSourceConfig,
    DynamicSamplingConfig,
    ModelConfig,
)
from grpo_dist.config.distillation import DemonstrationStreamConfig, DistillationConfig, TeacherConfig
from grpo_dist.config.environments import EnvironmentsConfig, SandboxConfig
from grpo_dist.config.monitoring import (
    BenchConfig,
    CheckpointConfig,
    EvaluationConfig,
    FixedLengths,
    HealthConfig,
    LengthsConfig,
    LognormalLengths,
    MetricConfig,
    NaturalLengths,
    ProfileConfig,
    SinkConfig,
    TrackingConfig,
)
from grpo_dist.config.rewards import (
    GatedConfig,
    RewardConfig,
    RewardModelConfig,
    RewardsConfig,
    SourceRewardsConfig,
)
from grpo_dist.config.sampling import SamplingConfig
from grpo_dist.config.stages import DemonstrationsConfig, RejectionConfig, SFTConfig
from grpo_dist.config.supervised import SupervisedConfig
from grpo_dist.config.workers import (
    LoRAConfig,
    OffloadConfig,
    OptimizerConfig,
    PolicyConfig,
    ReferenceConfig,
    RolloutConfig,
    SpeculationConfig,
    TransferBackend,
    WeightSyncConfig,
)
