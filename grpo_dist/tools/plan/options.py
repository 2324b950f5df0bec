"""One configuration on one cluster: assumptions, memory, problems and simulated times."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from grpo_dist.config import Config
from grpo_dist.config.files import changed
from grpo_dist.errors import UserError
from grpo_dist.policy.deepspeed_config import deepspeed_config
from grpo_dist.runtime.model_config import length_problem
from grpo_dist.tools.bench.result import BenchResult
from grpo_dist.tools.plan.accelerators import ClusterShape, Peaks
from grpo_dist.tools.plan.calibration import Calibration, calibrate
from grpo_dist.tools.plan.memory import EngineFootprint, Footprint, Sizes
from grpo_dist.tools.plan.models import FrozenModel, ModelShape, frozen_models, model_of
from grpo_dist.tools.plan.placement import Roles, footprints, memory_problems, roles_of
from grpo_dist.tools.plan.rates import Rates, Reached
from grpo_dist.tools.plan.simulation import Scenario, Simulated, simulate
from grpo_dist.tools.plan.workload import Workload, workload_of

COMPARED_STEPS = 2  # simulated steps of options that are only compared
_PART = 64  # prompts per step in a part of a large cluster
_SIGNAL_SHARE = 0.6  # share of groups with nonzero variance: about half at a suitable difficulty


@dataclass(frozen=True, slots=True)
class Assumptions:
    """A plan's assumptions beyond the configuration and the cluster.

    Attributes:
        bench: a bench.json to calibrate with; None: data sheets.
        prompt_tokens: tokens per prompt; None: as in ``bench``, or a share of `data.max_prompt_tokens`.
        turns, tool_seconds: per episode; None: as in ``bench``, or see `workload_of`.
        shared_tokens: common prefix of all prompts; None: as in ``bench`` if its prompts are planned.
        accepted: accepted tokens per draft; None: as in ``bench``, else none.
    """

    bench: Path | None = None
    prompt_tokens: int | None = None
    turns: int | None = None
    tool_seconds: float | None = None
    shared_tokens: int | None = None
    accepted: float | None = None

    def check(self, *, has_environments: bool, drafted: int = 0) -> None:
        """Raise UserError, naming the command's option, for a value out of range or without effect.
        ``drafted``: `rollout.speculation.tokens`.
        """
        for option, value, least in (
            ("--prompt-tokens", self.prompt_tokens, 1),
            ("--shared-tokens", self.shared_tokens, 0),
            ("--turns", self.turns, 1),
            ("--tool-seconds", self.tool_seconds, 0),
        ):
            if value is not None and not least <= value < math.inf:  # also rejects NaN
                raise UserError(f"{option} {value:g}: expected {least} or more")
        if self.accepted is not None and not drafted:
            raise UserError("--accepted: nothing is drafted; set `rollout.speculation.tokens`, or remove it")
        if self.accepted is not None and not 0 <= self.accepted <= drafted:
            raise UserError(
                f"--accepted {self.accepted:g}: expected accepted tokens per draft, 0 to "
                f"`rollout.speculation.tokens` = {drafted}"
            )
        if not has_environments and (self.turns is not None or self.tool_seconds is not None):
            raise UserError(
                "--turns, --tool-seconds: no source of problems has an environment (`data.environment`); "
                "remove them"
            )


@dataclass(frozen=True)
class Setting:
    """Shared inputs of a plan's options. ``frozen``: teachers, and reward models with known sizes.
    ``unplanned``: reason per other reward model, by name. ``accepted``: see `Assumptions`.
    """

    cluster: ClusterShape
    model: ModelShape
    workload: Workload
    calibration: Calibration | None
    frozen: tuple[FrozenModel, ...] = ()
    unplanned: Mapping[str, str] = field(default_factory=dict)
    accepted: float | None = None

    @property
    def reached(self) -> Reached:
        reached = self.calibration.reached if self.calibration else Reached()
        return reached if self.accepted is None else replace(reached, accepted=1.0 + self.accepted)


def build_setting(
    config: Config,
    cluster: ClusterShape,
    assumed: Assumptions = Assumptions(),
) -> Setting:
    """Build the setting of a plan of ``config``. Raises UserError for assumptions that contradict it, a
    benchmark of other hardware, or prompts that a run would drop.
    """
    speculation = config.rollout.speculation
    drafted = speculation.tokens if speculation else 0
    assumed.check(has_environments=config.has_environments, drafted=drafted)
    if cluster.card is None and assumed.bench is None:
        raise UserError(
            f"--cluster {cluster}: what processors can do is in no data sheet; measure with `grpo-dist bench "
            "configs/bench/cpu_13m_lognormal.yaml` and pass its bench.json as --bench"
        )
    calibration = calibrate(BenchResult.read(assumed.bench), cluster) if assumed.bench else None
    benchmarked = dict(calibration.workload) if calibration else {}
    if assumed.prompt_tokens is not None:
        benchmarked.pop("shared_tokens", None)  # belongs to other prompts
    stated = {
        "prompt_tokens": assumed.prompt_tokens,
        "shared_tokens": assumed.shared_tokens,
        "turns": assumed.turns,
        "tool_s": assumed.tool_seconds,
    }
    workload = workload_of(config, **benchmarked | {k: v for k, v in stated.items() if v is not None})
    if workload.shared_tokens >= workload.prompt_tokens:
        raise UserError(
            f"--shared-tokens {workload.shared_tokens}: a prompt has {workload.prompt_tokens} tokens "
            "(--prompt-tokens); expected fewer"
        )
    tokens, most = workload.prompt_tokens, config.data.max_prompt_tokens
    if tokens > most:
        measured = f"--bench {assumed.bench}: its prompts have {tokens} tokens,"
        what = f"--prompt-tokens {tokens}:" if assumed.prompt_tokens is not None else measured
        raise UserError(
            f"{what} longer prompts than `data.max_prompt_tokens` = {most} are dropped; raise that, or pass "
            f"at most {most} as --prompt-tokens"
        )
    model = model_of(config.model, config.sft, config.seed)
    supervised = config.sft if config.is_supervised else None
    longest = supervised.max_length if supervised else config.max_length
    if problem := length_problem(model.positions, longest, model.name, supervised=supervised is not None):
        raise UserError(problem)
    return Setting(cluster, model, workload, calibration, *frozen_models(config), assumed.accepted)


@dataclass(frozen=True)
class Option:
    """``problems``: why it cannot run or does not fit; empty if it can."""

    config: Config
    roles: Roles
    memory: dict[str, Footprint]
    problems: list[str]
    scenario: Scenario

    @property
    def engine(self) -> EngineFootprint:
        engine = self.memory["rollout"]
        assert isinstance(engine, EngineFootprint)
        return engine


@dataclass(frozen=True)
class Planned:
    option: Option
    simulated: Simulated


def option_of(config: Config, setting: Setting) -> Option:
    """Plan ``config`` without simulating it. Raises UserError if the cluster has too few devices."""
    cluster, model, calibration = setting.cluster, setting.model, setting.calibration
    roles = roles_of(config, model, cluster, cpus=calibration.cpus if calibration else None)
    memory = cluster.card.memory if cluster.card else 0
    sizes = Sizes.from_config(config, gpu=cluster.card is not None, memory=memory)
    frozen = tuple(m.on_a_whole_gpu() if roles.sharing else m for m in setting.frozen)
    needs = footprints(config, model, sizes, setting.workload, roles, memory=memory, frozen=frozen)
    engine = needs["rollout"]
    assert isinstance(engine, EngineFootprint)
    peaks = calibration.peaks_of(roles) if calibration else Peaks.from_cluster(cluster)
    scenario = Scenario(
        config,
        Rates(config, model, sizes, peaks, setting.reached),
        setting.workload,
        capacity=max(1, engine.mean),
        sharing=roles.sharing if cluster.gpus else frozenset(),  # on CPUs role switches move nothing
        reference_is_base=config.needs_reference and roles.reference_is_base,
        signal_share=_SIGNAL_SHARE if config.dynamic_sampling.enabled else 1.0,
        frozen=frozen,
    )
    problems = memory_problems(config, needs, cluster, roles)
    try:  # errors that policy ranks would raise at their start
        deepspeed_config(config.policy, bfloat16=sizes.itemsize == 2)
    except ValueError as error:
        problems.insert(0, str(error))
    return Option(config, roles, needs, problems, scenario)


def planned(option: Option, *, steps: int = 4) -> Planned:
    return Planned(option, simulate(replace(option.scenario, steps=steps)))


def compared(option: Option) -> Planned:
    """Like `planned`, with fewer steps and a part of a large cluster; for comparisons only."""
    return Planned(option, simulate(replace(option.scenario, steps=COMPARED_STEPS).as_part(_PART)))


def option_or_reason(config: Config, changes: Mapping[str, Any], setting: Setting) -> Option | str:
    """Return the option with ``changes`` by dotted key, or why it is refused or does not fit."""
    try:
        option = option_of(changed(config, changes), setting)
    except ValidationError as error:
        return "; ".join(item["msg"].removeprefix("Value error, ") for item in error.errors())
    except ValueError as error:
        return str(error)
    return "; ".join(option.problems) if option.problems else option
