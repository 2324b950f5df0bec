"""What a completion is worth."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from grpo_dist.config.base import Section


class GatedConfig(Section):
    """How a part of the reward counts."""

    weight: float = Field(1.0, description="factor in the sum; 0: only reported, and it cannot spoil the sum")
    gate: str | None = Field(
        None, description="name of another reward; this one is 0 where that is not above `gate_above`"
    )
    gate_above: float = Field(0.0, description="what the gate must be above")


class RewardConfig(GatedConfig):
    """A reward that is a function of the completion."""

    name: str = Field("", description="label in metrics; empty: the function's name")
    function: str = Field(
        description="a built-in reward (grpo_dist/rewards/README.md lists them), or `module:function`"
    )
    kwargs: dict[str, Any] = Field({}, description="settings of the function")


class RewardModelConfig(GatedConfig):
    """A reward that a classifier gives."""

    name: str = Field(min_length=1, description="label in metrics")
    path: str = Field(description="local directory or hub id of a sequence or token classifier")
    revision: str | None = Field(None, description="branch, tag or commit of a hub model")
    kind: Literal["outcome", "process"] = Field(
        "outcome", description="outcome: one score a completion; process: one a step"
    )
    reduce: Literal["min", "mean", "last"] = Field(
        "min", description="process: what the scores of the steps come to"
    )
    step_separator: str = Field("\n\n", min_length=1, description="process: text between two steps")
    step_mark: str | None = Field(
        None,
        description="process: text put behind each step, at whose last token the score is read; null: "
        "step_separator",
    )
    num_workers: PositiveInt = Field(1, description="actors that hold the model, with a GPU each")
    micro_batch_tokens: PositiveInt = Field(16384, description="tokens in one forward, padding included")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="auto: bfloat16 where the accelerator supports it, else float32"
    )
    trust_remote_code: bool = Field(False, description="run Python code that ships with the model")

    @model_validator(mode="after")
    def _settings_of_its_kind(self) -> RewardModelConfig:
        of_process = ("reduce", "step_mark", "step_separator")
        foreign = [n for n in of_process if getattr(self, n) != type(self).model_fields[n].default]
        if self.kind == "outcome" and foreign:
            raise ValueError(
                f"{', '.join(foreign)}: settings of kind process, but `kind` is outcome; remove them "
                "or set kind: process"
            )
        return self


class RewardsConfig(Section):
    """What a completion is worth: the sum of weight * reward over functions and models."""

    functions: tuple[RewardConfig, ...] = (RewardConfig(function="math"),)
    models: tuple[RewardModelConfig, ...] = Field((), description="reward models, workers of their own")
    num_workers: PositiveInt = Field(1, description="reward actors")
    processes_per_worker: PositiveInt = Field(2, description="killable grader processes of each actor")
    timeout_s: PositiveFloat = Field(5.0, description="deadline of one answer, seconds")
    memory_mb: PositiveInt = Field(
        1024, description="address space a grader process may take beyond its start"
    )
    code_paths: tuple[str, ...] = Field((), description="directories added to the path of custom reward code")
    accept_arithmetic: bool = Field(
        False, description="math: arithmetic left undone, 123+456, is right for a plain number, 579"
    )
    thought_tags: tuple[str, str] | None = Field(
        None, description="tags around a thought; null: those of the prompt or chat template, else <think>"
    )
    prompt_opens_thought: bool | None = Field(
        None, description="whether the prompt ends with the opening tag; null: read from the rendered prompt"
    )
    shuffle: bool = Field(False, description="control: deal each step's rewards among its samples at random")

    @model_validator(mode="after")
    def _tags_differ(self) -> RewardsConfig:
        if self.thought_tags is not None:
            opening, closing = self.thought_tags
            if not opening.strip() or not closing.strip() or opening == closing:
                raise ValueError(
                    f"thought_tags = {list(self.thought_tags)}: expected two different tags that are not "
                    "empty, e.g. [<think>, </think>]"
                )
        return self

    @model_validator(mode="after")
    def _distinct(self) -> RewardsConfig:
        names = [r.name or r.function for r in self.functions] + [m.name for m in self.models]
        if len(set(names)) != len(names):
            raise ValueError(f"two rewards share a name: {names}; set `name` of each")
        if not names:
            raise ValueError("neither functions nor models; name at least one reward")
        if sum(m.kind == "process" for m in self.models) > 1:
            raise ValueError("two models of kind process, but a sample has one list of steps; keep one")
        if self.shuffle and any(m.kind == "process" for m in self.models):
            raise ValueError(
                "shuffle = true deals out whole rewards, and a model of kind process also gives rewards of "
                "steps, which would keep their meaning; remove the one or the other"
            )
        return self

    @model_validator(mode="after")
    def _gates_end(self) -> RewardsConfig:
        gates = {r.name or r.function: r.gate for r in self.functions} | {m.name: m.gate for m in self.models}
        for name in gates:
            path = [name]
            while (gate := gates[path[-1]]) is not None:
                if gate not in gates:
                    raise ValueError(
                        f"gate = {gate} of reward {path[-1]}: no such reward; expected one of "
                        f"{', '.join(gates)}"
                    )
                if gate in path:
                    raise ValueError(f"gates go in a circle: {' -> '.join([*path, gate])}; remove one")
                path.append(gate)
        return self
