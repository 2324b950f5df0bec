"""`grpo-dist plan`: from a configuration and a cluster's name to what would happen there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from grpo_dist.config import Config, DataConfig, RolloutConfig
from grpo_dist.errors import UserError
from grpo_dist.runtime.files import check_replaceable
from grpo_dist.tools.bench.result import BenchResult
from grpo_dist.tools.plan import timeline as timeline_file
from grpo_dist.tools.plan.accelerators import ClusterShape, parse_cluster
from grpo_dist.tools.plan.assumptions import Assumptions
from grpo_dist.tools.plan.calibration import calibrate
from grpo_dist.tools.plan.evaluation import first_epoch_steps
from grpo_dist.tools.plan.models import ModelShape, model_of
from grpo_dist.tools.plan.options import Planned, Setting, option_of, option_or_reason, planned
from grpo_dist.tools.plan.phases import RunLengths, phases_of
from grpo_dist.tools.plan.report import print_plan
from grpo_dist.tools.plan.result import Plan
from grpo_dist.tools.plan.reward_models import reward_models_of
from grpo_dist.tools.plan.stragglers import Stragglers
from grpo_dist.tools.plan.sweep import Cell, Tried, cells, own_cell, search
from grpo_dist.tools.plan.tail import SYNCHRONOUS, print_tail
from grpo_dist.tools.plan.whole_run import whole_run
from grpo_dist.tools.plan.workload import workload_of

_HOUR_S = 3600.0

Splits = Literal["none", "own", "sweep"]
_NOTHING_ASSUMED = Assumptions()


def make_plan(
    config: Config,
    cluster: str,
    assumed: Assumptions = _NOTHING_ASSUMED,
    *,
    price: float | None = None,
    splits: Splits = "own",
) -> Plan:
    """Plan ``config`` on ``cluster``.

    ``price``: of a GPU for an hour. ``splits``: which splits of the GPUs to try; "own": at the configured
    batch and staleness, "sweep": at others, too. Raises UserError.
    """
    sampling = config.sampling
    config = config.model_copy(update={"sampling": config.sampling.at_its_longest})  # the dearest steps
    setting = made_setting(config, parse_cluster(cluster, price=price), assumed)
    check_prompts(setting, config.data, assumed)
    option, refused, own = None, "", own_cell(config.batch, config.max_staleness)
    try:
        option = option_of(config, setting)
        refused = "; ".join(option.problems)
    except UserError as error:
        refused = str(error)
    simulated = planned(option) if option and not refused else None
    found: list[Planned] = []
    tried: list[Tried] = []
    if splits != "none" and setting.cluster.gpus > 1:
        for cell in cells(config.batch, config.max_staleness, config.weight_sync, wide=splits == "sweep"):
            result = search(config, setting, cell)
            found += [result.best] if result.best else []
            tried = result.tried if cell == own else tried
    if simulated is None and not found:
        raise UserError(f"{config.name} on {setting.cluster}: {refused}")
    found = _own_first(own, found)
    shown = simulated or found[0]
    lengths = RunLengths(sampling, first_epoch_steps(config.data, config.batch.prompts_per_step) or 0)
    whole = whole_run(shown, phases_of(shown, lengths))
    return Plan(setting, option, simulated, refused, found, whole, tried, sampling, own)


@dataclass(frozen=True)
class PlanArguments:
    """The options of the command line."""

    cluster: str
    bench: str | None
    price: float | None
    prompt_tokens: int | None
    shared_tokens: int | None
    turns: int | None
    tool_seconds: float | None
    failure_hours: float
    slow_engines: str | None
    slow_rank: float
    sweep: bool
    timeline: str | None
    tail: bool
    accepted: float | None

    def check_tail(self) -> None:
        """Raise UserError for an option that --tail does not use."""
        unused = {"turns": None, "tool_seconds": None, "failure_hours": 0.0, "slow_engines": None}
        unused |= {"slow_rank": 1.0, "sweep": False, "timeline": None}
        if given := [name for name, usual in unused.items() if getattr(self, name) != usual]:
            flag = given[0].replace("_", "-")
            raise UserError(f"--{flag}: --tail compares ways to sample alone, and does not use it; remove it")


def plan(config: Config, arguments: PlanArguments) -> None:
    """Make a plan, print it, and write its timeline."""
    shape = parse_cluster(arguments.cluster, price=arguments.price)
    bench = Path(arguments.bench) if arguments.bench else None
    if arguments.tail:
        arguments.check_tail()
        longest = config.model_copy(update={"sampling": config.sampling.at_its_longest})
        given = Assumptions(
            bench,
            arguments.prompt_tokens,
            shared_tokens=arguments.shared_tokens,
            accepted=arguments.accepted,
        )
        setting = made_setting(longest, shape, given)
        check_prompts(setting, longest.data, given)
        base = option_or_reason(longest, SYNCHRONOUS, setting)
        if isinstance(base, str):
            raise UserError(f"--tail: expected a split with GPUs of its own for each role, but {base}")
        print_tail(base, setting)
        return
    if arguments.timeline:
        check_replaceable(Path(arguments.timeline))
    assumed = Assumptions(
        bench,
        arguments.prompt_tokens,
        arguments.turns,
        arguments.tool_seconds,
        arguments.failure_hours,
        _stragglers(config.rollout, shape, arguments.slow_engines, arguments.slow_rank),
        arguments.shared_tokens,
        arguments.accepted,
    )
    splits: Splits = "sweep" if arguments.sweep else "own"
    made = make_plan(config, arguments.cluster, assumed, price=arguments.price, splits=splits)
    print_plan(made)
    if arguments.timeline:
        shown = made.simulated or made.found[0]
        timeline_file.write(shown.simulated, Path(arguments.timeline))
        print(f"written: {arguments.timeline} (open it in https://ui.perfetto.dev)")


def made_setting(
    config: Config,
    cluster: ClusterShape,
    assumed: Assumptions = _NOTHING_ASSUMED,
    *,
    model: ModelShape | None = None,
) -> Setting:
    """Return what all options of a plan share, see `make_plan`. ``model``: its sizes, where ``config`` names
    one that is made later. Raises UserError.
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
    known, unplanned = reward_models_of(config.rewards)
    return Setting(
        cluster,
        model or model_of(config.model, config.sft, config.seed),
        workload,
        calibration,
        assumed.failure_hours * _HOUR_S,
        assumed.stragglers,
        known,
        unplanned,
        assumed.accepted,
    )


def check_prompts(setting: Setting, data: DataConfig, assumed: Assumptions) -> None:
    """Raise UserError for prompts that a run with ``data`` would drop."""
    tokens, most = setting.workload.prompt_tokens, data.max_prompt_tokens
    if tokens <= most:
        return
    given = assumed.prompt_tokens is not None
    what = (
        f"--prompt-tokens {tokens}:"
        if given
        else f"--bench {assumed.bench}: its prompts have {tokens} tokens,"
    )
    raise UserError(
        f"{what} longer prompts than `data.max_prompt_tokens` = {most} are dropped; raise that, or pass at "
        f"most {most} as --prompt-tokens"
    )


def _stragglers(
    rollout: RolloutConfig, cluster: ClusterShape, engines: str | None, rank: float
) -> Stragglers:
    """Parse ``engines`` (COUNTxFACTOR) and ``rank``. Raises UserError."""
    most = cluster.gpus or rollout.num_workers
    of = f"of {cluster}" if cluster.gpus else "of `rollout.num_workers`"
    count, sign, factor = (engines or "0x1").partition("x")
    try:
        slow = Stragglers(int(count), float(factor), rank)
    except ValueError:
        sign = ""
    if not sign or not 0 <= slow.engines <= most or not 1 <= slow.engine_factor < math.inf:
        raise UserError(
            f"--slow-engines {engines}: expected COUNTxFACTOR, a number of engines up to {most} ({of}) and a "
            "factor of 1 or more, e.g. 1x1.5"
        )
    if not 1 <= rank < math.inf:
        raise UserError(f"--slow-rank {rank:g}: expected a factor of 1 or more, e.g. 1.5")
    return slow


def _own_first(own: Cell, found: list[Planned]) -> list[Planned]:
    """Move the option of ``own`` to the front, or else the fastest."""

    def rank(p: Planned) -> tuple[bool, float]:
        config = p.option.config
        return own_cell(config.batch, config.max_staleness) == own, p.simulated.tokens_per_s

    first = max(found, key=rank, default=None)
    return [first, *(p for p in found if p is not first)] if first else []
