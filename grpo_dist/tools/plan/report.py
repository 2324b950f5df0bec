"""Prints a plan: memory, times, cost, what bounds them, the best split, the timeline."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from grpo_dist.config import (
    CheckpointConfig,
    ClusterConfig,
    Config,
    RewardsConfig,
)
from grpo_dist.runtime.hardware import GIB
from grpo_dist.runtime.tables import print_lines
from grpo_dist.tools.bench.table import written
from grpo_dist.tools.plan.accelerators import ClusterShape
from grpo_dist.tools.plan.bottleneck import STAGES, reason
from grpo_dist.tools.plan.cold_start import cold_start, cold_start_problem, is_trained_first
from grpo_dist.tools.plan.elastic import elastic_lines
from grpo_dist.tools.plan.memory import USABLE, Sizes
from grpo_dist.tools.plan.options import Option, Planned, Setting, node_host_bytes
from grpo_dist.tools.plan.rank_failures import RankFailures, rank_failures
from grpo_dist.tools.plan.report_head import head_lines
from grpo_dist.tools.plan.report_splits import cost_per_million, splits_lines, splits_table, wide_table
from grpo_dist.tools.plan.result import Plan
from grpo_dist.tools.plan.reward_models import role_of
from grpo_dist.tools.plan.sharing import REFRESH, SYNC
from grpo_dist.tools.plan.timeline import LEGEND, as_text

_ENGINES = ("rollout", "evaluation")  # roles whose workers have `rollout.tensor_parallel_size` GPUs
_NO_PROGRESS = 0.9  # share of the time that failures take; above it a run hardly advances
_LIKELY = 0.01  # the least chance that is worth a warning


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Print the whole plan: memory, times, cost, the splits that were tried, and a timeline."""
    console = console or Console(highlight=False)
    shown = plan.simulated or plan.found[0]
    cluster = plan.setting.cluster
    print_lines(console, head_lines(plan))
    if plan.refused:
        print_lines(console, [f"as configured: does not fit: {plan.refused}"])
    if plan.configured:
        console.print(_memory(plan.configured, cluster))
        print_lines(console, _host(plan.configured, cluster))
    print_lines(console, _cold_start(plan.setting, (plan.configured or plan.found[0].option).config))
    if plan.simulated is None:
        console.print(_memory(shown.option, cluster, "best split"))
        print_lines(console, _host(shown.option, cluster))
    title = "as configured" if plan.simulated else "best split"
    print_lines(console, [f"{title}: {shown.option.roles.words}"])
    console.print(_times(shown))
    failures = rank_failures_of(shown, plan.setting) is not None
    print_lines(console, [*_slow(shown), *_summary(shown, plan.setting, plan.whole.step_s)])
    print_lines(console, plan.whole.lines(price=cluster.price, failures=failures))
    gpu_price = cluster.card.price if cluster.card else 0.0
    print_lines(console, elastic_lines(shown, plan.whole, price=gpu_price))
    print_lines(console, warnings(shown, plan.setting))
    if plan.found:
        console.print(splits_table(plan))
    print_lines(console, splits_lines(plan))
    print_lines(console, [LEGEND, *as_text(shown.simulated)])


def warnings(planned: Planned, setting: Setting) -> list[str]:
    """Return what a real run would fail at, and what the plan leaves out."""
    config, run, lines = planned.option.config, planned.simulated, []
    # `sample_s` covers sampling and scoring; which groups waited for a reward model is unknown.
    sampled_s = max(run.longest_batch_s, run.stage_s.get("reward_model", 0.0))
    for key, seconds in (("sample_s", sampled_s), ("update_s", run.longest_update_s)):
        allowed = getattr(config.cluster.timeouts, key)
        if seconds > allowed:
            lines.append(
                f"warning: {seconds:,.0f} s exceeds `cluster.timeouts.{key}` = {allowed:g}; raise it"
            )
    return lines + _about_reward_models(config.rewards, setting)


def _about_reward_models(rewards: RewardsConfig, setting: Setting) -> list[str]:
    lines = []
    for model in rewards.models:
        if why := setting.unplanned.get(model.name):
            lines.append(
                f"warning: reward model {model.name}: {why}; its {model.num_workers} worker(s) are "
                "placed, but neither their memory nor their time is planned"
            )
    return lines


def _slow(planned: Planned) -> list[str]:
    config, slow, lines = planned.option.config, planned.option.scenario.stragglers, []
    if slow.engines and slow.engine_factor > 1:
        count = min(slow.engines, config.rollout.num_workers)
        lines.append(
            f"slow: {count} of {config.rollout.num_workers} engine(s): sampling takes "
            f"{slow.engine_factor:g} times as long there"
        )
    if slow.rank_factor > 1:
        lines.append(
            f"slow: a policy rank: updates take {slow.rank_factor:g} times as long: all ranks wait for it"
        )
    return lines


def _memory(option: Option, cluster: ClusterShape, title: str = "as configured") -> Table:
    limit = f", {cluster.card.memory * USABLE / GIB:.0f} GiB usable" if cluster.card else ""
    where = "a GPU" if cluster.card else "the machine"
    table = wide_table(f"memory of {where}, GiB ({title}{limit})", "role", "parts", "total")
    for role, footprint in option.memory.items():
        parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in footprint.parts.items() if size)
        if footprint.total_host:
            parts += f"; in host memory {footprint.total_host / GIB:.1f}"
        table.add_row(f"{role}{_count(option, role)}", parts, f"{footprint.total / GIB:.1f}")
    engine = option.engine
    table.caption = (
        f"an engine's cache holds {engine.longest:,} sequences of {option.config.max_length:,} tokens; "
        f"{option.scenario.capacity:,} of mean length are decoded at once"
    )
    return table


def _count(option: Option, role: str) -> str:
    if role not in option.roles.workers:
        return ", both on a GPU" if role in (SYNC, REFRESH) else ""
    parallel = f" (TP {option.config.rollout.tensor_parallel_size})" if role in _ENGINES else ""
    return f" x {option.roles.workers[role]}{parallel}"


def _host(option: Option, cluster: ClusterShape) -> list[str]:
    """Describe the host memory of the fullest node, and the time of a turn on shared GPUs."""
    needed, rates = node_host_bytes(option.memory, option.roles, cluster), option.scenario.rates
    if not needed:
        return []
    kinds = dict.fromkeys(kind for need in option.memory.values() for kind in need.host | need.host_first)
    lines = [
        f"host memory of a node: {needed / GIB:,.0f} of {cluster.host / GIB:,.0f} GiB (assumed) for "
        f"{', '.join(kinds)}, in addition to what each process itself takes"
    ]
    if option.roles.sharing:
        peaks, reached = rates.peaks, rates.reached
        turns = {"policy": rates.turn_s()}
        if "reference" in option.roles.sharing:
            turns["reference"] = rates.reference_turn_s()
        for model in option.scenario.reward_models:
            turns[role_of(model.settings)] = rates.reward_model_turn_s(model)
        listed = ", ".join(f"{role} {written(seconds, 's')}" for role, seconds in turns.items())
        lines.append(
            f"turns: until its states are on the GPU, or in host memory again: {listed}; "
            f"{peaks.host * reached.host / 1e9:,.0f} GB/s each way for a GPU, and {reached.turn_s:g} s to "
            "sleep and wake (assumed)"
        )
    return lines


def _times(planned: Planned) -> Table:
    run = planned.simulated
    table = wide_table("times; stages may overlap", "stage", "in a step", "of the step")
    for stage, seconds in run.stage_s.items():
        table.add_row(STAGES[stage], written(seconds, "s"), written(seconds / run.step_s, "%"))
    table.add_row("[bold]step", written(run.step_s, "s"), "")
    return table


def _summary(planned: Planned, setting: Setting, mean_s: float) -> list[str]:
    """Describe rates, idle time and cost. ``mean_s``: of a step of the whole run."""
    run, steps, cluster = planned.simulated, planned.option.config.steps, setting.cluster
    hours, engines, policy = run.step_s / 3600, *(written(run.idle[r], "%") for r in ("rollout", "policy"))
    failures, all_hours = rank_failures_of(planned, setting, mean_s), steps * mean_s / 3600
    lines = [
        f"{run.tokens_per_s:,.0f} tokens/s ({run.completion_tokens_per_s:,.0f} of completions), "
        f"{run.samples / run.step_s:,.1f} samples/s; {steps} steps take {all_hours:,.1f} h",
        f"idle: engines {engines}, policy {policy}: {reason(planned)}",
        f"an engine decodes {run.sequences:,.0f} sequences at once on average, and could decode "
        f"{planned.option.scenario.capacity:,}",
        f"driver: {written(run.driver_cpu_s, 's')} of CPU time a step for its own code; at most "
        f"{run.queue:,} groups waited for an engine; mean staleness {run.staleness:.2f}"
        + (f"; {run.failed_engines} engines failed and were replaced" if run.failed_engines else ""),
    ]
    if failures:
        lines += _failures(
            planned.option.config.checkpoint,
            planned.option.config.cluster,
            planned.option.config.steps,
            failures,
        )
    if cluster.card and cluster.price:
        price, unused = cluster.price, cluster.gpus - planned.option.roles.gpus
        lines.append(
            f"cost: ${cost_per_million(run, cluster):.3g} a million tokens, ${price * hours:,.2f} a step, "
            f"${price * all_hours:,.0f} the run"
            + (f" without failures{_cost_with(failures, price)}" if failures else "")
            + f" (steps alone), at ${cluster.card.price:g} an hour for each GPU"
            + (f" ({unused} of {cluster.gpus} are paid for but not used)" if unused else "")
        )
    return lines


def rank_failures_of(planned: Planned, setting: Setting, step_s: float | None = None) -> RankFailures | None:
    """Estimate what failing policy ranks cost; None without `--failure-hours`. An engine on the same GPU
    notices a failure at once. ``step_s``: mean of the run; None: of the simulated steps.
    """
    run, scenario, config = planned.simulated, planned.option.scenario, planned.option.config
    step_s = run.step_s if step_s is None else step_s
    return rank_failures(
        config.policy.num_workers,
        config.checkpoint,
        config.cluster.restarts,
        steps=config.steps,
        step_s=step_s,
        unseen_s=0.0 if scenario.sharing else run.idle["policy"] * step_s,
        failure_every_s=setting.failure_every_s,
        restart_s=scenario.failures.restart_s,
    )


def _failures(
    checkpoint: CheckpointConfig, cluster: ClusterConfig, steps: int, found: RankFailures
) -> list[str]:
    every = checkpoint.every
    since = f"since the last checkpoint (`checkpoint.every` = {every})" if every else "since the first step"
    line = (
        f"failures of policy ranks: one every {found.every_s / 3600:,.1f} h; restarts (assumed: "
        f"{found.restart_s / 60:,.1f} min each) and the steps repeated {since} take "
        f"{written(found.share, '%')} of the time"
    )
    if found.share > _NO_PROGRESS:
        remedy = "set `checkpoint.every`" if not every else "lower `checkpoint.every`" if every > 1 else ""
        return [f"{line}: the run hardly advances{remedy and f'; {remedy}'}"]
    hours = found.expected_s / 3600
    lines = [
        f"{line}: {steps} steps take {hours:,.1f} h with them (without the back-off of `cluster.restarts`)"
    ]
    if found.ends > _LIKELY:
        most, window = cluster.restarts.max_per_worker, cluster.restarts.window_s
        lines.append(
            f"warning: with a chance of about {written(found.ends, '%')} more than "
            f"`cluster.restarts.max_per_worker` = {most} of them come within `window_s` = {window:g} s, "
            "which ends the run; raise it, or rerun the command to resume from the last checkpoint"
        )
    return lines


def _cost_with(found: RankFailures, price: float) -> str:
    return "" if found.share > _NO_PROGRESS else f" and ${price * found.expected_s / 3600:,.0f} with them"


def _cold_start(setting: Setting, config: Config) -> list[str]:
    """Describe the memory of supervised training, which ends before the workers start."""
    if config.sft is None or not is_trained_first(config.model, config.sft):
        return []
    sizes = Sizes.of(config, gpu=setting.cluster.card is not None)
    need = cold_start(config.sft, setting.model, sizes)
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in need.parts.items())
    lines = [
        f"cold start, before all workers: {need.total / GIB:.1f} GiB of one process with "
        f"{config.sft.batch_size} rows of `sft.max_length` = {config.sft.max_length} tokens ({parts})"
    ]
    problem = cold_start_problem(need, setting.cluster)
    more = "; `check` uses the real lengths of the rows"
    return lines + ([f"warning: {problem}{more}"] if problem else [])
