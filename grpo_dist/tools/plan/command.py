"""`grpo-dist plan`: from a configuration and a cluster's name to what would happen there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from grpo_dist.config import Config
from grpo_dist.errors import UserError
from grpo_dist.observe.profiling import write_trace
from grpo_dist.runtime.files import check_replaceable
from grpo_dist.tools.plan.accelerators import parse_cluster
from grpo_dist.tools.plan.options import Planned, option_of, planned
from grpo_dist.tools.plan.report import Plan, print_plan
from grpo_dist.tools.plan.search import SearchResult, search
from grpo_dist.tools.plan.setting import Assumptions, build_setting
from grpo_dist.tools.plan.simulation import Simulated
from grpo_dist.tools.plan.tail import print_tail
from grpo_dist.tools.plan.whole_run import whole_run


@dataclass(frozen=True, slots=True)
class PlanArguments:
    """The options of the command line. ``price``: of a GPU for an hour."""

    cluster: str
    assumed: Assumptions = Assumptions()  # noqa: RUF009 (immutable)
    price: float | None = None
    timeline: str | None = None
    tail: bool = False


def plan(config: Config, arguments: PlanArguments) -> None:
    """Make a plan, print it, and write its timeline. Raises UserError."""
    if arguments.tail and arguments.timeline:
        raise UserError("--timeline: --tail compares several runs and writes no trace; remove it")
    if arguments.timeline:
        check_replaceable(Path(arguments.timeline))
    if arguments.tail:
        longest = at_its_longest(config)
        cluster = parse_cluster(arguments.cluster, price=arguments.price)
        print_tail(longest, build_setting(longest, cluster, arguments.assumed))
        return
    made = make_plan(config, arguments.cluster, arguments.assumed, price=arguments.price)
    print_plan(made)
    if arguments.timeline:
        _write_timeline(made.shown.simulated, Path(arguments.timeline))
        print(f"written: {arguments.timeline} (open it in https://ui.perfetto.dev)")


def make_plan(
    config: Config,
    cluster: str,
    assumed: Assumptions = Assumptions(),  # noqa: B008 (immutable)
    *,
    price: float | None = None,
    splits: bool = True,
) -> Plan:
    """Plan ``config`` on ``cluster``. ``price``: of a GPU for an hour; ``splits``: also search for the best
    split of the GPUs. Raises UserError.
    """
    sampling, config = config.sampling, at_its_longest(config)
    setting = build_setting(config, parse_cluster(cluster, price=price), assumed)
    option, simulated = None, None
    try:
        option = option_of(config, setting)
        refused = "; ".join(option.problems)
    except UserError as error:
        refused = str(error)
    if option and not refused:
        simulated = planned(option)
    result = search(config, setting) if splits and setting.cluster.gpus > 1 else SearchResult(None, [])
    shown: Planned | None = simulated or result.best
    if shown is None:
        raise UserError(f"{config.name} on {setting.cluster}: {refused}")
    return Plan(setting, option, simulated, refused, result, shown, whole_run(shown), sampling)


def at_its_longest(config: Config) -> Config:
    """Return ``config`` with the longest completions of its schedule: the dearest steps."""
    return config.model_copy(update={"sampling": config.sampling.at_its_longest})


def _write_timeline(run: Simulated, path: Path) -> None:
    """Write a trace of the simulated steps. Raises UserError where that fails."""
    try:
        ends = {f"end of step {step}": end for step, end in enumerate(run.ends, start=1)}
        write_trace(path, run.bars, ends)
    except OSError as error:
        raise UserError(
            f"--timeline {path}: cannot be written ({error.strerror}); name another file"
        ) from error
