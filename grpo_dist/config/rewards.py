"""Rewards: functions, reward models, and their weights and gates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError

from grpo_dist.config.base import Choice, CodePaths, Section, Tagged, repeated

StepReduction = Annotated[
    Literal["min", "mean", "last"],
    Field(description="how the step scores become the reward of the completion"),
]
StepSeparator = Annotated[str, Field(min_length=1, description="text between two steps")]
StepMark = Annotated[
    str | None,
    Field(
        description="text after each step, at whose last token the step's score is read; null: <extra_0>, "
        "ки, a line break, or step_separator of a classifier"
    ),
]
VerdictTokens = Annotated[
    tuple[str, str] | None, Field(description="tokens of a good and a bad step; null: + and -")
]


class GatedConfig(Section):
    """Weight and gate of one part of the reward."""

    weight: float = Field(
        1.0,
        description="factor in the sum; 0: only logged, and its failures leave no sample unscored",
    )
    gate: str | None = Field(
        None, description="name of another reward; this reward is 0 unless the other is above `gate_above`"
    )
    gate_above: float = Field(0.0, description="threshold of the gate")


class FunctionConfig(GatedConfig, Choice):
    """A reward computed by a function of the completion."""

    tag = "kind"
    bare = "function"
    kind: str
    name: str = Field("", description="label in metrics; empty: the function's name")
    function: str = Field(
        pattern=r"^\w[\w.:-]*$",
        description="a built-in reward (grpo_dist/rewards/README.md lists them), or `module:function`",
    )
    kwargs: dict[str, Any] = Field({}, description="keyword arguments of the function")

    @property
    def label(self) -> str:
        """The name in metrics."""
        return self.name or self.function


class RewardConfig(FunctionConfig):
    """A number for each completion."""

    kind: Literal["outcome"] = "outcome"


class ProcessRewardConfig(FunctionConfig):
    """A user-supplied function that returns a number for each of `steps`."""

    kind: Literal["process"] = "process"
    reduce: StepReduction = "min"
    step_separator: StepSeparator = "\n\n"


class RewardModelConfig(GatedConfig, Choice):
    """A reward computed by a classifier model."""

    tag = "kind"
    kind: str
    name: str = Field(min_length=1, description="label in metrics")
    path: str = Field(description="local directory or hub id of a sequence or token classifier")
    revision: str | None = Field(None, description="branch, tag or commit of a hub model")
    num_workers: PositiveInt = Field(
        1, description="copies of the model, each an actor; colocated: one on each of the policy's GPUs"
    )
    gpu_share: float = Field(
        1.0, ge=1e-4, le=1,
        description="share of a GPU that a copy takes, e.g. 0.25, up to 1 on a GPU; not counted where "
        "colocated",
    )  # fmt: skip
    tensor_parallel_size: PositiveInt = Field(1, description="GPUs of one node that a copy is split over")
    micro_batch_tokens: PositiveInt = Field(16384, description="tokens in one forward pass, with padding")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="auto: bfloat16 where the accelerator supports it, else float32"
    )
    trust_remote_code: bool = Field(False, description="run Python code that ships with the model")

    @property
    def label(self) -> str:
        """The name in metrics."""
        return self.name

    @property
    def gpus(self) -> float:
        """GPUs of one copy: a whole number, or a share of a GPU in Ray's units of 1e-4. Rounded down, since
        Ray rounds to the nearest: six shares of 1/6 would exceed a GPU.
        """
        if self.gpu_share < 1:
            return math.floor(self.gpu_share * 1e4 + 1e-6) / 1e4
        return float(self.tensor_parallel_size)

    def _contradictions(self) -> Iterator[str]:
        size = self.tensor_parallel_size
        if size > 1 and self.gpu_share < 1:
            yield (
                f"gpu_share = {self.gpu_share:g} with tensor_parallel_size = {size}: a copy either shares a "
                "GPU or is split over several; set one of them to 1"
            )
        if size > 1 and self.trust_remote_code:
            yield (
                f"tensor_parallel_size = {size}: remote code (`trust_remote_code`) has no tensor-parallel "
                "plan; set one of them to its default"
            )


class OutcomeModelConfig(RewardModelConfig):
    """A sequence classifier: one score per completion."""

    kind: Literal["outcome"] = "outcome"


class ProcessModelConfig(RewardModelConfig):
    """A model that scores the steps of a completion."""

    reduce: StepReduction = "min"
    step_separator: StepSeparator = "\n\n"


class MarkedStepsConfig(ProcessModelConfig):
    """A model that scores a step at a mark after it."""

    step_mark: StepMark = None


class TokenClassifierConfig(MarkedStepsConfig):
    """A token classifier, which scores a step at its mark."""

    kind: Literal["classifier"] = "classifier"


class QwenConfig(MarkedStepsConfig):
    """Qwen2.5-Math-PRM."""

    kind: Literal["qwen"] = "qwen"


class SkyworkConfig(MarkedStepsConfig):
    """Skywork-o1-Open-PRM, by its value head."""

    kind: Literal["skywork"] = "skywork"


class MathShepherdConfig(MarkedStepsConfig):
    """A causal model, by its verdict tokens, at the marks of steps."""

    kind: Literal["math_shepherd"] = "math_shepherd"
    verdict_tokens: VerdictTokens = None


class RLHFlowConfig(ProcessModelConfig):
    """A causal model, by its verdict tokens, one turn of the conversation per step."""

    kind: Literal["rlhflow"] = "rlhflow"
    verdict_tokens: VerdictTokens = None


class PrefixesConfig(ProcessModelConfig):
    """A sequence classifier, on the solution up to each step."""

    kind: Literal["prefixes"] = "prefixes"


FunctionReward = Annotated[RewardConfig | ProcessRewardConfig, Tagged()]
RewardModel = Annotated[
    OutcomeModelConfig
    | TokenClassifierConfig
    | QwenConfig
    | SkyworkConfig
    | MathShepherdConfig
    | RLHFlowConfig
    | PrefixesConfig,
    Tagged(),
]


class OverlongBufferConfig(Section):
    """DAPO's soft punishment of long answers (arXiv:2503.14476, equation 13), a part of every total reward.

    Lengths are tokens after the prompt, as the reward `overlong` counts them; in episodes also the tokens of
    the environment.
    """

    tokens: PositiveInt | None = Field(
        None, description="length of the buffer before `sampling.max_new_tokens`; null: a fifth of that"
    )
    penalty: NonNegativeFloat = Field(
        0.0, description="subtracted from the reward at the end of the buffer; 0: off; the paper: 1"
    )

    def _contradictions(self) -> Iterator[str]:
        if self.tokens is not None and not self.penalty:
            yield (
                f"tokens = {self.tokens} has no effect with penalty = 0; set `penalty`, e.g. 1, or remove it"
            )

    @property
    def functions(self) -> tuple[RewardConfig, ...]:
        """The reward of the buffer; empty if it is off."""
        if not self.penalty:
            return ()
        kwargs = {"buffer_tokens": self.tokens}
        return (RewardConfig(function="overlong", kwargs=kwargs, weight=self.penalty),)


class RewardTrialConfig(Section):
    """Two completions of the first problem, scored before a run; `{answer}` in them is its answer."""

    right: str = Field(description="must score higher in total, e.g. `<SOLUTION>{answer}</SOLUTION>`")
    wrong: str = Field(description="must score lower, e.g. `<SOLUTION>no</SOLUTION>`")


class SourceRewardsConfig(Section):
    """The rewards of one source, which override `rewards`."""

    functions: tuple[FunctionReward, ...] = ()
    models: tuple[str, ...] = Field((), description="names of the rewards.models that score this source")
    trial: RewardTrialConfig | None = None


class RewardsConfig(Section):
    """The total reward: the sum of weight * reward over functions and models."""

    functions: tuple[FunctionReward, ...] = (RewardConfig(function="math"),)
    models: tuple[RewardModel, ...] = Field((), description="reward models, each with its own workers")
    by_source: dict[str, SourceRewardsConfig] = Field(
        {},
        description="rewards of single sources by name, which override the two keys above, e.g. {code: "
        "{functions: [{function: my_rewards:tests_pass}]}}",
    )
    overlong_buffer: OverlongBufferConfig = Field(default_factory=OverlongBufferConfig)
    num_workers: PositiveInt = Field(1, description="reward actors")
    processes_per_worker: PositiveInt = Field(2, description="killable grader processes of each actor")
    timeout_s: PositiveFloat = Field(5.0, description="deadline for grading one answer, seconds")
    memory_mb: PositiveInt = Field(
        1024, description="address space a grader process may add after its start, MB"
    )
    code_paths: CodePaths = ()
    accept_arithmetic: bool = Field(
        False, description="math: accept unevaluated arithmetic, e.g. 123+456 for 579"
    )
    require_box: bool = Field(
        False,
        description="math: only an answer in `\\boxed{}` counts; not set: true where the prompts of every "
        "training source ask for a box",
    )
    thought_tags: tuple[str, str] | None = Field(
        None,
        description="tags around a thought; null: from the prompt or chat template, else <think>",
    )
    trial: RewardTrialConfig | None = Field(
        None,
        description="a right and a wrong completion for the trial of the rewards; null: common forms of an "
        "answer",
    )
    shuffle: bool = Field(False, description="control: shuffle each step's rewards among its samples")

    def _contradictions(self) -> Iterator[str]:
        if self.thought_tags is not None:
            opening, closing = self.thought_tags
            if not opening.strip() or not closing.strip() or opening == closing:
                yield (
                    f"thought_tags = {list(self.thought_tags)}: expected two different tags that are not "
                    "empty, e.g. [<think>, </think>]"
                )
        yield from self._check_names()
        yield from self._check_gates()
        yield from self._check_sources()

    def _check_names(self) -> Iterator[str]:
        functions = (*self.functions, *self.overlong_buffer.functions)
        names = [r.label for r in functions] + [m.name for m in self.models]
        if repeated(names):
            yield f"two rewards share a name: {names}; set `name` on each"
        if not (self.functions or self.models or self.by_source):
            yield "no functions and no models; configure at least one reward"
        if self._process_rewards > 1:
            yield "two rewards of steps, but a sample has a single list of steps; keep one"
        if self.shuffle and self.scores_steps:
            yield (
                "shuffle = true shuffles total rewards only, but a reward of steps also gives step "
                "rewards, which would stay unshuffled; remove one of them"
            )

    def _check_gates(self) -> Iterator[str]:
        gates = {r.label: r.gate for r in self.functions} | {m.name: m.gate for m in self.models}
        for name in gates:
            path = [name]
            while (gate := gates[path[-1]]) is not None:
                if gate not in gates:
                    yield (
                        f"gate = {gate} of reward {path[-1]}: no such reward; expected one of "
                        f"{', '.join(gates)}"
                    )
                if gate in path:
                    yield f"gates form a cycle: {' -> '.join([*path, gate])}; remove one"
                path.append(gate)

    def _check_sources(self) -> Iterator[str]:
        model_names, defined = {model.name for model in self.models}, dict[str, FunctionConfig]()
        for source, settings in self.by_source.items():
            if unknown := [name for name in settings.models if name not in model_names]:
                yield (
                    f"by_source.{source}.models = {unknown[0]}: no such model; `rewards.models` has: "
                    f"{', '.join(sorted(model_names)) or 'none'}"
                )
            try:
                type(self).model_validate(self.select_source(source).model_dump())
            except ValidationError as error:
                yield f"by_source.{source}: {error.errors()[0]['msg']}"
        for one in self.all_functions:
            other = defined.setdefault(one.label, one)
            if (one.function, one.kwargs) != (other.function, other.kwargs):
                yield (
                    f"by_source: reward {one.label} is not the same in all sources, but it is "
                    "one metric; set `name` on each"
                )

    @property
    def scores_steps(self) -> bool:
        """Whether a model or a function rewards the steps of a completion."""
        return self._process_rewards > 0

    @property
    def _process_rewards(self) -> int:
        rewards = (*self.functions, *self.models)
        return sum(isinstance(reward, ProcessRewardConfig | ProcessModelConfig) for reward in rewards)

    def select_source(self, source: str) -> RewardsConfig:
        """Return the rewards of the prompts of a source, with the overlong buffer as one of them."""
        settings = self.by_source.get(source)
        common = {"by_source": {}, "overlong_buffer": OverlongBufferConfig()}
        if settings is None:
            functions = (*self.functions, *self.overlong_buffer.functions)
            return self.model_copy(update=common | {"functions": functions})
        models = tuple(model for model in self.models if model.name in settings.models)
        functions = (*settings.functions, *self.overlong_buffer.functions)
        return self.model_copy(
            update=common | {"functions": functions, "models": models, "trial": settings.trial}
        )

    @property
    def variants(self) -> dict[str, RewardsConfig]:
        """The rewards by source: of each source in `by_source`, and of all others under ""."""
        return {source: self.select_source(source) for source in ("", *self.by_source)}

    def check_common_weights(self, advantage: str) -> Iterator[str]:
        """Yield a message for every reward whose weight differs between sources, for an estimator that uses
        one weight.
        """
        for name in self.names:
            weights = {each.weights[name] for each in self.variants.values() if name in each.weights}
            if len(weights) > 1:
                yield (
                    f"`algorithm.advantage` = {advantage} uses one weight of reward {name} for all "
                    f"sources, but `rewards.by_source` has {sorted(weights)}; use one weight or several names"
                )

    def functions_key(self, source: str) -> str:
        """Return the key of the functions that score ``source``."""
        return f"rewards.by_source.{source}.functions" if source in self.by_source else "rewards.functions"

    @property
    def all_functions(self) -> tuple[FunctionConfig, ...]:
        """The functions of all sources."""
        return tuple(function for rewards in self.variants.values() for function in rewards.functions)

    @property
    def names(self) -> list[str]:
        """The names of all rewards, each once."""
        functions = [function.label for function in self.all_functions]
        return list(dict.fromkeys([*functions, *(model.name for model in self.models)]))

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each reward; where sources differ, the last weight."""
        functions = {f.label: f.weight for f in self.all_functions}
        return functions | {model.name: model.weight for model in self.models}
