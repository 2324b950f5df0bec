"""All sections of a run, and values derived from them. `checks.Config` adds checks across sections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from grpo_dist.config.algorithm import AdvantageConfig, AlgorithmConfig
from grpo_dist.config.base import Count, DirectoryName, Section, Seed
from grpo_dist.config.cluster import ClusterConfig
from grpo_dist.config.data import BatchConfig, DataConfig, DynamicSampling, ModelConfig, NoDynamicSampling
from grpo_dist.config.distillation import DemonstrationStreamConfig, DistillationConfig
from grpo_dist.config.environments import EnvironmentsConfig
from grpo_dist.config.monitoring import (
    BenchConfig,
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
from grpo_dist.errors import expanded
from grpo_dist.plugins.user_code import UserComponent

_WITH_CODE = ("rewards", "environments")  # sections with a `code_paths` field


def _add_code_paths(section: Any, paths: Sequence[str]) -> Any:
    if isinstance(section, Section):
        return section.model_copy(update={"code_paths": tuple(paths)})
    if section is None:
        return {"code_paths": paths}
    return {**section, "code_paths": paths} if isinstance(section, Mapping) else section


def _asks_for_box(data: Mapping[str, Any]) -> bool:
    """Return whether the training prompts of section `data` ask for an answer in a box; an evaluation's
    sources are in `data.train`, too.
    """
    sources = data.get("train")
    sources = [s for s in sources if isinstance(s, Mapping)] if isinstance(sources, list | tuple) else []

    def asks(source: Mapping[str, Any]) -> bool:
        keys = ("template", "instruction", "system_prompt")
        texts = [data.get(key) if source.get(key) is None else source[key] for key in keys]
        return any("\\boxed" in str(text) for text in (*texts, source.get("problem_template")))

    return all(map(asks, sources or [{}]))


class Sections(Section):
    """The fields of `Config`."""

    name: DirectoryName = Field("run", description="name of the run and of its directory in `output_dir`")
    output_dir: str = Field("runs", description="directory that contains the run directories")
    seed: Seed = Field(0, description="random seed of the prompt order, all samples, and demo models")
    steps: PositiveInt = Field(100, description="training steps of the whole run")
    epochs: PositiveFloat | None = Field(
        None,
        description="passes over data.train, instead of `steps`: epochs * rows / batch.prompts_per_step, "
        "rounded down",
    )
    max_staleness: Count = Field(
        0, description="0: synchronous, on-policy; n: sampling runs up to n steps ahead"
    )
    code_paths: tuple[str, ...] = Field(
        (),
        description="directories of user code, for every key that takes `my_module:name`; searched before "
        "installed packages",
    )
    model: ModelConfig
    data: DataConfig
    batch: BatchConfig = Field(default_factory=BatchConfig)
    dynamic_sampling: DynamicSampling = Field(
        NoDynamicSampling(), description="replace zero-variance (DAPO), too easy and too hard groups"
    )
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    distillation: DistillationConfig = Field(default_factory=DistillationConfig)
    demonstrations: DemonstrationStreamConfig | None = Field(
        None, description="demonstrations added to the samples of every step; null: none"
    )
    rewards: RewardsConfig = Field(default_factory=RewardsConfig)
    environments: EnvironmentsConfig = Field(default_factory=EnvironmentsConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig)
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    weight_sync: WeightSyncConfig = Field(default_factory=WeightSyncConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    health: HealthConfig = Field(default_factory=HealthConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)
    profile: ProfileConfig = Field(default_factory=ProfileConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    bench: BenchConfig = Field(default_factory=BenchConfig)
    sft: SFTConfig | None = Field(
        None, description="the supervised cold start that `model.path: sft` refers to"
    )
    rejection: RejectionConfig = Field(
        RejectionConfig(), description="how `grpo-dist sample` draws and selects samples"
    )

    @model_validator(mode="before")
    @classmethod
    def _share_code_paths(cls, values: Any) -> Any:
        """Give `code_paths` to the sections whose actors load user-supplied code."""
        if not isinstance(values, Mapping):
            return values
        for name in _WITH_CODE:
            if isinstance(section := values.get(name), Mapping) and "code_paths" in section:
                raise ValueError(
                    f"unknown key `{name}.code_paths`; an earlier version had it; write `code_paths`, one "
                    "list for the whole run"
                )
        paths = values.get("code_paths", ())
        if not isinstance(paths, list | tuple) or not all(isinstance(path, str) for path in paths):
            return values  # the field's validator refuses it
        return {**values, **{name: _add_code_paths(values.get(name), paths) for name in _WITH_CODE}}

    @model_validator(mode="before")
    @classmethod
    def _require_a_box_that_is_asked_for(cls, values: Any) -> Any:
        """Set `rewards.require_box` where it is not set and the prompt asks for a box."""
        if not isinstance(values, Mapping):
            return values
        data, rewards = values.get("data"), values.get("rewards")
        data = data.model_dump() if isinstance(data, Section) else data
        if not isinstance(data, Mapping) or not _asks_for_box(data):
            return values
        if isinstance(rewards, Section) and "require_box" not in rewards.model_fields_set:
            return {**values, "rewards": rewards.model_copy(update={"require_box": True})}
        if rewards is None or (isinstance(rewards, Mapping) and "require_box" not in rewards):
            return {**values, "rewards": {**(rewards or {}), "require_box": True}}
        return values

    def make_code_paths_absolute(self) -> Self:
        """Resolve relative `code_paths` against the working directory, for use in other processes."""
        paths = {"code_paths": tuple(str(expanded(path).absolute()) for path in self.code_paths)}
        sections = {name: getattr(self, name).model_copy(update=paths) for name in _WITH_CODE}
        return self.model_copy(update=paths | sections)

    def input_paths(self) -> Iterator[tuple[str, str, bool]]:
        """Yield key, value and True for every path of a model; key, value and False for every path of data.

        A value is a path or a hub id. Excluded is what the run generates: the result of a cold start, the
        reference as teacher, and rows of a user's function.
        """
        if self.model.path != "sft":
            yield "model.path", self.model.path, True
        if self.model.adapter is not None:
            yield "model.adapter", self.model.adapter, True
        yield from ((f"rewards.models.{i}.path", m.path, True) for i, m in enumerate(self.rewards.models))
        for name, sources in (("train", self.data.train), ("eval", self.data.eval)):
            for i, source in enumerate(sources):
                if source.path is not None and not source.is_own:
                    yield f"data.{name}.{i}.path", source.path, False
        if self.sft is not None:
            yield "sft.model", self.sft.model, True
            yield from ((f"sft.data.{i}.path", source.path, False) for i, source in enumerate(self.sft.data))
        for i, teacher in enumerate(self.distillation.teachers):
            if teacher.has_workers:
                yield f"distillation.teachers.{i}.model", teacher.model, True
        for i, demonstrations in enumerate(self.demonstrations.data if self.demonstrations else ()):
            yield f"demonstrations.data.{i}.path", demonstrations.path, False

    @property
    def user_components(self) -> tuple[UserComponent, ...]:
        """The user-supplied components of the run, without environments and rewards."""
        sections = (self.algorithm, self.data, self.rollout, self.tracking)
        return tuple(component for section in sections for component in section.user_components)

    @property
    def source_algorithms(self) -> dict[str, AlgorithmConfig]:
        """`algorithm` with the overrides of each training source that has any, by label."""
        return {s.label: s.algorithm.over(self.algorithm) for s in self.data.train if s.algorithm is not None}

    @property
    def source_estimators(self) -> dict[str, AdvantageConfig]:
        """The advantage estimators that training sources override, by label."""
        parts = {s.label: s.algorithm.advantage for s in self.data.train if s.algorithm is not None}
        return {label: advantage for label, advantage in parts.items() if advantage is not None}

    @property
    def estimators(self) -> tuple[AdvantageConfig, ...]:
        """The advantage estimators of the run: of `algorithm`, and of sources that override it."""
        return (self.algorithm.advantage, *self.source_estimators.values())

    @property
    def rewards_by_estimator(self) -> list[tuple[str, RewardsConfig]]:
        """Names of the advantage estimators, `algorithm.advantage` first, each with its rewards: without the
        rewards of sources that override the estimator.
        """
        overrides = self.source_estimators
        by_source = {key: value for key, value in self.rewards.by_source.items() if key not in overrides}
        shared = self.rewards.model_copy(update={"by_source": by_source})
        return [
            (self.algorithm.advantage.name, shared),
            *((estimator.name, self.rewards.select_source(label)) for label, estimator in overrides.items()),
        ]

    @property
    def has_kl_term(self) -> bool:
        """Whether the loss or the rewards have a KL term."""
        return self.algorithm.kl.coef > 0

    @property
    def needs_reference(self) -> bool:
        """Whether the KL term or a teacher needs the reference's log-probs."""
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
        """Whether the ranks only minimise the cross-entropy of demonstrations, without other workers."""
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
    def shortens_completions(self) -> bool:
        """Whether `model.max_length` leaves less than the longest completion after the longest prompt."""
        return self.max_length < self.data.max_prompt_tokens + self.longest_completion

    @property
    def longest_completion(self) -> int:
        """Most tokens of a completion in training, evaluation and rejection sampling."""
        others = (self.evaluation.max_new_tokens, self.rejection.max_new_tokens)
        return max(self.sampling.longest, *(tokens or 0 for tokens in others))
