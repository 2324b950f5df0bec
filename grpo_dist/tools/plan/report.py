"""Prints a plan: memory, times, cost, what bounds them, the best split, the timeline."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from grpo_dist.config import Config
from grpo_dist.runtime.hardware import GIB
from grpo_dist.runtime.tables import make_table, print_lines
from grpo_dist.tools.bench.table import written
from grpo_dist.tools.plan.accelerators import ClusterShape
from grpo_dist.tools.plan.bottleneck import reason
from grpo_dist.tools.plan.cold_start import cold_start, cold_start_problem, is_trained_first
from grpo_dist.tools.plan.memory import USABLE
from grpo_dist.tools.plan.options import Option, Planned, Setting
from grpo_dist.tools.plan.rank_failures import RankFailures, rank_failures
from grpo_dist.tools.plan.result import Plan
from grpo_dist.tools.plan.reward_models import reward_model_workers
from grpo_dist.tools.plan.simulation import Simulated
from grpo_dist.tools.plan.timeline import LEGEND, as_text

_STAGES = {
    "sample": "generation",
    "reward_model": "scoring by models",
    "score": "scoring",
    "logprobs": "reference",
    "update": "training",
    "sync": "weight sync",
    "turn": "changes of turns",
}
_NO_PROGRESS = 0.9  # share of the time that failures take; above it a run hardly advances
_LIKELY = 0.01  # the least chance that is worth a warning


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Print the whole plan: memory, times, cost, the splits that were tried, and a timeline."""
    console = console or Console(highlight=False)
    shown = plan.simulated or plan.found[0]
    cluster = plan.setting.cluster
    print_lines(console, _head(plan))
    if plan.refused:
        print_lines(console, [f"as configured: does not fit: {plan.refused}"])
    if plan.configured:
        console.print(_memory(plan.configured, cluster))
    print_lines(console, _cold_start(plan.setting, (plan.configured or plan.found[0].option).config))
    if plan.simulated is None:
        console.print(_memory(shown.option, cluster, "best split"))
    title = "as configured" if plan.simulated else "best split"
    print_lines(console, [f"{title}: {shown.option.roles.words}"])
    console.print(_times(shown))
    failures = rank_failures_of(shown, plan.setting) is not None
    print_lines(console, [*_slow(shown), *_summary(shown, plan.setting)])
    print_lines(console, plan.whole.lines(price=cluster.price, failures=failures))
    print_lines(console, warnings(shown, plan.setting))
    if plan.found:
        console.print(_found(plan))
        print_lines(console, [_why(plan), *_tried(plan)])
    print_lines(console, [LEGEND, *as_text(shown.simulated)])


def cost_per_million(run: Simulated, cluster: ClusterShape) -> float:
    """Return dollars per million tokens of prompts and completions; all GPUs of the cluster are paid for."""
    return cluster.price / 3600 / run.tokens_per_s * 1e6


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
    return lines + _about_reward_models(config, setting)


def _about_reward_models(config: Config, setting: Setting) -> list[str]:
    lines = []
    for model in config.rewards.models:
        if why := setting.unplanned.get(model.name):
            lines.append(
                f"warning: reward model {model.name}: {why}; its {model.num_workers} worker(s) are "
                "placed, but neither their memory nor their time is planned"
            )
        elif model.dtype == "float32" and setting.cluster.card:
            lines.append(
                f"warning: reward model {model.name}: float32 takes longer than planned: the plan "
                "assumes the peak of half precision"
            )
    return lines


def _head(plan: Plan) -> list[str]:
    setting = plan.setting
    model, workload, calibration = setting.model, setting.workload, setting.calibration
    lines = [
        f"{model.name}: {model.parameters / 1e9:,.3f} billion parameters on {setting.cluster}",
        f"lengths: prompts of {workload.prompt_tokens}, completions of {workload.mean:,.0f} tokens on "
        f"average, at most {workload.cap:,}",
        f"times: {calibration.reached.source if calibration else 'data sheet with assumed efficiencies'}",
    ]
    if workload.assumed:
        lines.append(f"assumed: {workload.assumed}")
    if setting.reward_models:
        lines.append(
            "assumed: reward models read as many tokens as the policy writes; their templates and step "
            "marks are left out"
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
    table = _table(f"memory of {where}, GiB ({title}{limit})", "role", "parts", "total")
    for role, footprint in option.memory.items():
        parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in footprint.parts.items() if size)
        if footprint.host:
            own = sum(footprint.host.values()) / GIB
            parts += f"; in host memory {own:.1f}"
        table.add_row(f"{role} x {_count(option, role)}", parts, f"{footprint.total / GIB:.1f}")
    engine = option.engine
    table.caption = (
        f"an engine's cache holds {engine.longest:,} sequences of {option.config.max_length:,} tokens; "
        f"{option.scenario.capacity:,} of mean length are decoded at once"
    )
    return table


def _count(option: Option, role: str) -> str:
    config = option.config
    if role == "rollout":
        return f"{config.rollout.num_workers} (TP {config.rollout.tensor_parallel_size})"
    others = {"policy": config.policy.num_workers, "reference": config.reference.num_workers}
    return str((others | reward_model_workers(config))[role])


def _times(planned: Planned) -> Table:
    run = planned.simulated
    table = _table("times; stages may overlap", "stage", "in a step", "of the step")
    for stage, seconds in run.stage_s.items():
        table.add_row(_STAGES[stage], written(seconds, "s"), written(seconds / run.step_s, "%"))
    table.add_row("[bold]step", written(run.step_s, "s"), "")
    return table


def _summary(planned: Planned, setting: Setting) -> list[str]:
    run, steps, cluster = planned.simulated, planned.option.config.steps, setting.cluster
    hours, engines, policy = run.step_s / 3600, *(written(run.idle[r], "%") for r in ("rollout", "policy"))
    failures = rank_failures_of(planned, setting)
    lines = [
        f"{run.tokens_per_s:,.0f} tokens/s ({run.completion_tokens_per_s:,.0f} of completions), "
        f"{run.samples / run.step_s:,.1f} samples/s; {steps} steps take {steps * hours:,.1f} h",
        f"idle: engines {engines}, policy {policy}: {reason(planned)}",
        f"an engine decodes {run.sequences:,.0f} sequences at once on average, and could decode "
        f"{planned.option.scenario.capacity:,}",
        f"driver: {written(run.driver_cpu_s, 's')} of CPU time a step for its own code; at most "
        f"{run.queue:,} groups waited for an engine; mean staleness {run.staleness:.2f}"
        + (f"; {run.failed_engines} engines failed and were replaced" if run.failed_engines else ""),
    ]
    if failures:
        lines += _failures(planned.option.config, failures)
    if cluster.card and cluster.price:
        price, unused = cluster.price, cluster.gpus - planned.option.roles.gpus
        lines.append(
            f"cost: ${cost_per_million(run, cluster):.3g} a million tokens, ${price * hours:,.2f} a step, "
            f"${price * hours * steps:,.0f} the run"
            + (f" without failures{_cost_with(failures, price)}" if failures else "")
            + f" (steps alone), at ${cluster.card.price:g} an hour for each GPU"
            + (f" ({unused} of {cluster.gpus} are paid for but not used)" if unused else "")
        )
    return lines


def rank_failures_of(planned: Planned, setting: Setting) -> RankFailures | None:
    """Estimate what failing policy ranks cost; None without `--failure-hours`. An engine on the same GPU
    notices a failure at once.
    """
    run, scenario = planned.simulated, planned.option.scenario
    return rank_failures(
        planned.option.config,
        step_s=run.step_s,
        unseen_s=0.0 if scenario.colocated else run.idle["policy"] * run.step_s,
        failure_every_s=setting.failure_every_s,
        restart_s=scenario.failures.restart_s,
    )


def _failures(config: Config, found: RankFailures) -> list[str]:
    every = config.checkpoint.every
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
        f"{line}: {config.steps} steps take {hours:,.1f} h with them (without the back-off of "
        "`cluster.restarts`)"
    ]
    if found.ends > _LIKELY:
        most, window = config.cluster.restarts.max_per_worker, config.cluster.restarts.window_s
        lines.append(
            f"warning: with a chance of about {written(found.ends, '%')} more than "
            f"`cluster.restarts.max_per_worker` = {most} of them come within `window_s` = {window:g} s, "
            "which ends the run; raise it, or rerun the command to resume from the last checkpoint"
        )
    return lines


def _cost_with(found: RankFailures, price: float) -> str:
    return "" if found.share > _NO_PROGRESS else f" and ${price * found.expected_s / 3600:,.0f} with them"


def _found(plan: Plan) -> Table:
    cluster = plan.setting.cluster
    table = _table(
        f"best splits on {cluster}",
        "prompts",
        "staleness",
        "policy ranks",
        "engines",
        "step",
        "tokens/s",
        "$/M tokens",
    )
    for p in plan.found:
        c, run = p.option.config, p.simulated
        engines = f"{c.rollout.num_workers} x TP {c.rollout.tensor_parallel_size}"
        table.add_row(
            str(c.batch.prompts_per_step),
            str(c.max_staleness),
            f"{c.policy.num_workers} ZeRO-{c.policy.zero_stage}"
            + (" colocated" if p.option.roles.colocated else ""),
            engines,
            written(run.step_s, "s"),
            f"{run.tokens_per_s:,.0f}",
            f"{cost_per_million(run, cluster):.3g}",
        )
    return table


def _why(plan: Plan) -> str:
    chosen = plan.found[0]
    c = chosen.option.config
    keys = (
        f"rollout.num_workers={c.rollout.num_workers} "
        f"rollout.tensor_parallel_size={c.rollout.tensor_parallel_size} "
        f"policy.num_workers={c.policy.num_workers} policy.zero_stage={c.policy.zero_stage} "
        f"cluster.placement={c.cluster.placement}"
    )
    gain = ""
    if plan.simulated:
        times = chosen.simulated.tokens_per_s / plan.simulated.simulated.tokens_per_s
        gain = f", {times:.2f} times the tokens a second of the configuration as it is"
    return f"best at this batch and staleness: {keys}{gain}; {reason(chosen)}"


def _cold_start(setting: Setting, config: Config) -> list[str]:
    """Describe the memory of supervised training, which ends before the workers start."""
    if not is_trained_first(config):
        return []
    need = cold_start(config, setting.model, gpu=setting.cluster.card is not None)
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in need.parts.items())
    assert config.sft is not None
    lines = [
        f"cold start, before all workers: {need.total / GIB:.1f} GiB of one process with "
        f"{config.sft.batch_size} rows of `sft.max_length` = {config.sft.max_length} tokens ({parts})"
    ]
    problem = cold_start_problem(config, need, setting.cluster)
    more = "; `check` uses the real lengths of the rows"
    return lines + ([f"warning: {problem}{more}"] if problem else [])


def _tried(plan: Plan) -> list[str]:
    """Describe the splits of each placement and ZeRO stage: how many, the fastest, and what bounds it."""
    lines = ["tried at this batch and staleness, with TP 1, 2, 4 and 8:"]
    for tried in plan.tried:
        head = f"  {tried.placement}, ZeRO-{tried.zero_stage}: "
        if tried.best is None:
            lines.append(f"{head}none of {tried.splits} splits of GPUs can run: {tried.why}")
            continue
        c, run = tried.best.option.config, tried.best.simulated
        others = tried.splits - tried.fitting
        lines.append(
            f"{head}{c.policy.num_workers} rank(s) and {c.rollout.num_workers} x TP "
            f"{c.rollout.tensor_parallel_size} are the fastest of {tried.fitting}, {run.tokens_per_s:,.0f} "
            f"tokens/s; {reason(tried.best)}"
            + (f"; {others} more cannot run, e.g. {tried.why.partition('; ')[0]}" if others else "")
        )
    fixed = ["other ZeRO stages", "`policy.offload`", "`policy.sequence_parallel`", "`weight_sync.mode`"]
    fixed += ["`reference.num_workers`"] if plan.found[0].option.config.needs_reference else []
    return [*lines, f"not tried: other batches and staleness (--sweep does); {', '.join(fixed)} (set them)"]


def _table(title: str, first: str, *others: str) -> Table:
    """Make a table whose columns are at least as wide as the words of their headings."""
    table = make_table(title, (first, *others), left=(first, "parts"), bold=True)
    table.caption_justify = "left"
    for heading, column in zip(others, table.columns[1:], strict=True):
        column.min_width = max(map(len, heading.split()))
    return table
