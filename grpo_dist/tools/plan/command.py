"""`grpo-dist plan`: predicts a configuration's behaviour on a named cluster."""

from __future__ import annotations

from grpo_dist.config import Config
from grpo_dist.errors import UserError, as_user_errors
from grpo_dist.tools.plan.accelerators import parse_cluster
from grpo_dist.tools.plan.options import Assumptions, Planned, build_setting, option_of, planned
from grpo_dist.tools.plan.report import Plan, print_plan
from grpo_dist.tools.plan.search import SearchResult, search
from grpo_dist.tools.plan.tail import print_tail
from grpo_dist.tools.plan.whole_run import whole_run


def plan(
    config: Config, cluster: str, assumed: Assumptions, *, price: float | None = None, tail: bool = False
) -> None:
    """Make a plan and print it; with ``tail`` compare long-tail mitigations instead. ``price``: per GPU hour.
    Raises UserError.
    """
    if config.epochs is not None:
        from grpo_dist.runs.start import resolve_steps  # imports torch, which a plan does without

        with as_user_errors():
            config = resolve_steps(config, print)
    if tail:
        longest = at_its_longest(config)
        print_tail(longest, build_setting(longest, parse_cluster(cluster, price=price), assumed))
    else:
        print_plan(make_plan(config, cluster, assumed, price=price))


def make_plan(
    config: Config,
    cluster: str,
    assumed: Assumptions = Assumptions(),  # noqa: B008 (immutable)
    *,
    price: float | None = None,
    splits: bool = True,
) -> Plan:
    """Plan ``config`` on ``cluster``. ``price``: per GPU hour. ``splits``: also search for the best
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
    searches = splits and setting.cluster.gpus > 1
    result = search(config, setting, simulated) if searches else SearchResult(None, [])
    chosen: Planned | None = simulated or result.best
    if chosen is None:
        raise UserError(f"{config.name} on {setting.cluster}: {refused}")
    return Plan(setting, option, simulated, refused, result, chosen, whole_run(chosen), sampling)


def at_its_longest(config: Config) -> Config:
    """Return ``config`` with the longest completions of its schedule, the most expensive steps."""
    return config.model_copy(update={"sampling": config.sampling.at_its_longest})
