"""What all options of a plan share: the cluster, the model, the lengths, and what is taken as given."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from grpo_dist.config import Config, DataConfig
from grpo_dist.errors import UserError
from grpo_dist.runtime.model_config import length_problem
from grpo_dist.tools.bench.result import BenchResult
from grpo_dist.tools.plan.accelerators import ClusterShape
from grpo_dist.tools.plan.calibration import Calibration, calibrate
from grpo_dist.tools.plan.models import ModelShape, model_of
from grpo_dist.tools.plan.rates import Reached
from grpo_dist.tools.plan.reward_models import KnownRewardModel, reward_models_of
from grpo_dist.tools.plan.workload import Workload, workload_of


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What a plan takes as given, beyond the configuration and the cluster.

    Attributes:
        bench: a bench.json to calibrate with; None: data sheets.
        prompt_tokens: of every prompt; None: those of ``bench``, or a share of `data.max_prompt_tokens`.
        turns, tool_seconds: of an episode; None: those of ``bench``, or see `workload_of`.
        shared_tokens: that all prompts begin with; None: those of ``bench`` if its prompts are planned.
        accepted: right tokens of a draft; None: those of ``bench``, else none.
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
            if value is not None and not least <= value < math.inf:  # NaN is in no range
                raise UserError(f"{option} {value:g}: expected {least} or more")
        if self.accepted is not None and not drafted:
            raise UserError("--accepted: nothing is drafted; set `rollout.speculation.tokens`, or remove it")
        if self.accepted is not None and not 0 <= self.accepted <= drafted:
            raise UserError(
                f"--accepted {self.accepted:g}: expected right tokens of a draft, 0 to "
                f"`rollout.speculation.tokens` = {drafted}"
            )
        if not has_environments and (self.turns is not None or self.tool_seconds is not None):
            raise UserError(
                "--turns, --tool-seconds: no source of problems has an environment (`data.environment`); "
                "remove them"
            )


@dataclass(frozen=True)
class Setting:
    """``reward_models``: those with known sizes; ``unplanned``: why the others, by name, have none.
    ``accepted``: right tokens of a draft; None: see `Assumptions`.
    """

    cluster: ClusterShape
    model: ModelShape
    workload: Workload
    calibration: Calibration | None
    reward_models: tuple[KnownRewardModel, ...] = ()
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
    """Build the setting of a plan of ``config``. Raises UserError for assumptions that do not fit it, for a
    benchmark of other hardware, and for prompts that a run would drop.
    """
    assumed.check(has_environments=config.has_environments, drafted=config.rollout.speculation.tokens)
    if cluster.card is None and assumed.bench is None:
        raise UserError(
            f"--cluster {cluster}: what processors can do is in no data sheet; measure with `grpo-dist bench "
            "configs/bench/cpu_13m_lognormal.yaml` and pass its bench.json as --bench"
        )
    calibration = calibrate(BenchResult.read(assumed.bench), cluster) if assumed.bench else None
    lengths: Sequence[int] = calibration.lengths if calibration else ()
    prompt_tokens, shared_tokens = assumed.prompt_tokens, assumed.shared_tokens
    if prompt_tokens is None and calibration:
        prompt_tokens = calibration.prompt_tokens
        if shared_tokens is None:
            shared_tokens = calibration.shared_tokens
    turns, tool_s = assumed.turns, assumed.tool_seconds
    if calibration:
        turns = calibration.turns if turns is None else turns
        tool_s = calibration.tool_s if tool_s is None else tool_s
    workload = workload_of(
        config,
        prompt_tokens=prompt_tokens,
        shared_tokens=shared_tokens or 0,
        measured=lengths,
        turns=turns,
        tool_s=tool_s,
    )
    if workload.shared_tokens >= workload.prompt_tokens:
        raise UserError(
            f"--shared-tokens {workload.shared_tokens}: a prompt has {workload.prompt_tokens} tokens "
            "(--prompt-tokens); expected fewer"
        )
    _check_prompts(workload, config.data, assumed)
    known, unplanned = reward_models_of(config.rewards)
    model = model_of(config.model, config.sft, config.seed)
    supervised = config.is_supervised and config.sft is not None
    longest = config.sft.max_length if supervised and config.sft else config.max_length
    if problem := length_problem(model.positions, longest, model.name, supervised=supervised):
        raise UserError(problem)
    return Setting(cluster, model, workload, calibration, known, unplanned, assumed.accepted)


def _check_prompts(workload: Workload, data: DataConfig, assumed: Assumptions) -> None:
    """Raise UserError for prompts that a run with ``data`` would drop."""
    tokens, most = workload.prompt_tokens, data.max_prompt_tokens
    if tokens <= most:
        return
    what = (
        f"--bench {assumed.bench}: its prompts have {tokens} tokens,"
        if assumed.prompt_tokens is None
        else f"--prompt-tokens {tokens}:"
    )
    raise UserError(
        f"{what} longer prompts than `data.max_prompt_tokens` = {most} are dropped; raise that, or pass at "
        f"most {most} as --prompt-tokens"
    )
