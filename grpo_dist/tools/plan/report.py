"""Prints a plan: assumptions, memory, times, cost, bottlenecks, and the best split."""

from __future__ import annotations

import os
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from grpo_dist.config import Config, RewardsConfig, SamplingConfig
from grpo_dist.errors import expanded
from grpo_dist.runtime.hardware import GIB
from grpo_dist.runtime.tables import make_table, print_lines
from grpo_dist.tools.bench.table import written
from grpo_dist.tools.plan.accelerators import ClusterShape
from grpo_dist.tools.plan.memory import Sizes, cold_start, is_trained_first
from grpo_dist.tools.plan.models import itemsize_of
from grpo_dist.tools.plan.options import Option, Planned, Setting
from grpo_dist.tools.plan.placement import REFRESH, SYNC, USABLE, cold_start_problem, node_host_bytes
from grpo_dist.tools.plan.rates import delta_share
from grpo_dist.tools.plan.search import STAGES, SearchResult, reason
from grpo_dist.tools.plan.simulation import Simulated, assumed_row
from grpo_dist.tools.plan.whole_run import WholeRun

_PROMPTS = 4  # driver bytes per byte of JSON Lines with distinct rows, at the first start (measured 3.6)
_UNPACKED = 4  # bytes of text per byte of a compressed file
_ENGINES = ("rollout", "evaluation")  # roles whose workers have `rollout.tensor_parallel_size` GPUs


@dataclass(frozen=True)
class Plan:
    """``configured``: the configuration as it is, ``simulated``: its simulation; None if ``refused`` says why
    it cannot run. ``search``: the splits. ``shown``: ``simulated``, or the best split; ``whole``: its run.
    ``sampling``: the run's; all other fields assume its longest completions.
    """

    setting: Setting
    configured: Option | None
    simulated: Planned | None
    refused: str
    search: SearchResult
    shown: Planned
    whole: WholeRun
    sampling: SamplingConfig


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Print the whole plan."""
    console = console or Console(highlight=False)
    shown, cluster = plan.shown, plan.setting.cluster
    print_lines(console, head_lines(plan))
    if plan.refused:
        print_lines(console, [f"as configured: does not fit: {plan.refused}"])
    if plan.configured:
        console.print(_memory(plan.configured, cluster))
        print_lines(console, _host(plan.configured, cluster))
    print_lines(console, driver_lines(shown.option.config))
    print_lines(console, _cold_start(plan.setting, (plan.configured or shown.option).config))
    if plan.simulated is None:
        console.print(_memory(shown.option, cluster, "best split"))
        print_lines(console, _host(shown.option, cluster))
    title = "as configured" if plan.simulated else "best split"
    print_lines(console, [f"{title}: {shown.option.roles.words}"])
    console.print(_times(shown))
    print_lines(console, _summary(shown, plan.setting))
    print_lines(console, plan.whole.lines(price=cluster.price))
    print_lines(console, warnings(shown, plan.setting))
    print_lines(console, splits_lines(plan))


def driver_lines(config: Config) -> list[str]:
    """Describe the driver's memory for rows of local files, if it exceeds the process's base memory."""
    sources = [source.path for source in (*config.data.train, *config.data.eval)]
    if config.demonstrations is not None:
        sources += [source.path for source in config.demonstrations.data]
    paths = [expanded(path) for path in sources if path is not None]
    files = [path for path in paths if os.path.isfile(path)]  # False for a too long name
    packed = [path.suffix in (".parquet", ".gz") for path in files]
    sizes = [
        path.stat().st_size * (_UNPACKED if is_packed else 1)
        for path, is_packed in zip(files, packed, strict=True)
    ]
    if _PROMPTS * sum(sizes) < GIB:
        return []
    return [
        f"driver: at most {_PROMPTS * sum(sizes) / GIB:,.1f} GiB for prompts and demonstrations, less where "
        f"rows repeat; assumed: {_PROMPTS} bytes for each byte of text"
    ]


def head_lines(plan: Plan) -> list[str]:
    """Describe the model, the lengths, and the assumptions."""
    setting, config = plan.setting, plan.shown.option.config
    model, workload = setting.model, setting.workload
    lines = [
        f"{model.name}: {model.parameters / 1e9:,.3f} billion parameters on {setting.cluster}",
        f"lengths: prompts of {workload.prompt_tokens}, completions of {workload.mean:,.0f} tokens on "
        f"average, at most {workload.cap:,}",
    ]
    if workload.turns > 1:
        lines.append(
            f"episodes: {workload.turns} turns each, {workload.tool_s:g} s of an environment between two; "
            "engines sample other episodes meanwhile"
        )
    lines += _drafts(setting, config)
    lines.append(f"times: {setting.reached.source}")
    if plan.sampling.shortest != workload.cap:
        lines.append(
            f"upper bound: `sampling.max_new_tokens` begins with {plan.sampling.lengths[0]:,} tokens, but "
            f"every step is planned with its longest, {workload.cap:,}"
        )
    if config.data.order.name == "length":
        lines.append(
            "assumed: the length of every prompt is known from an epoch before; in the first epoch steps "
            "take as long as with `data.order`=epochs"
        )
    if workload.assumed:
        lines.append(f"assumed: {workload.assumed}")
    if demonstrations := config.demonstrations:
        prompt, completion = assumed_row(config.max_length)
        lines.append(
            f"assumed: each of the {demonstrations.rows_per_step} demonstrations of a step has {prompt} + "
            f"{completion} tokens, half of the longest that may be"
        )
    if config.weight_sync.deltas is True:
        lr = config.policy.optimizer.lr
        share = delta_share(itemsize_of(config.model.dtype, gpu=setting.cluster.card is not None), lr)
        lines.append(
            f"assumed: `weight_sync.deltas` sends {100 * share:.2g} % of the weights' bytes after the first "
            f"steps, by `policy.optimizer.lr` = {lr:g} and the model's type"
        )
    if any(model.is_reward_model for model in setting.frozen):
        lines.append(
            "assumed: reward models read as many tokens as the policy writes; their templates and step "
            "marks are left out"
        )
    return lines


def _drafts(setting: Setting, config: Config) -> list[str]:
    """Describe the acceptance of drafted tokens, with speculation."""
    drafts, accepted = config.rollout.speculation, setting.reached.accepted - 1
    if drafts is None:
        return []
    assumed, source = "assumed: ", " (--accepted)"
    if setting.accepted is not None:
        assumed = ""
    elif setting.calibration and accepted:
        assumed, source = "", " (measured)"
    return [
        f"{assumed}drafts of {drafts.tokens} tokens, in every pass of an engine with at most "
        f"{drafts.max_sequences} sequences; {accepted:g} accepted per draft{source}"
    ]


def warnings(planned: Planned, setting: Setting) -> list[str]:
    """Return what would fail in a real run, and what the plan excludes."""
    config, run, lines = planned.option.config, planned.simulated, []
    # `sample_s` covers sampling and scoring; waits for reward models are unknown.
    sampled_s = max(run.longest_batch_s, run.stage_s.get("reward_model", 0.0))
    for key, seconds in (("sample_s", sampled_s), ("update_s", run.longest_update_s)):
        allowed = getattr(config.cluster.timeouts, key)
        if seconds > allowed:
            lines.append(
                f"warning: {seconds:,.0f} s exceeds `cluster.timeouts.{key}` = {allowed:g}; raise it"
            )
    return lines + _about_reward_models(config.rewards, setting)


def _about_reward_models(rewards: RewardsConfig, setting: Setting) -> list[str]:
    return [
        f"warning: reward model {model.name}: {why}; its {model.num_workers} worker(s) are placed, but "
        "neither their memory nor their time is planned"
        for model in rewards.models
        if (why := setting.unplanned.get(model.name))
    ]


def _memory(option: Option, cluster: ClusterShape, title: str = "as configured") -> Table:
    limit = f", {cluster.card.memory * USABLE / GIB:.0f} GiB usable" if cluster.card else ""
    where = "a GPU" if cluster.card else "the machine"
    table = _wide_table(f"memory of {where}, GiB ({title}{limit})", "role", "parts", "total")
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
    """Describe the fullest node's host memory, and the time of a role switch on shared GPUs."""
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
        for model in option.scenario.scorers:
            if model.role in option.roles.sharing:
                turns[model.role] = rates.scoring_turn_s(model)
        listed = ", ".join(f"{role} {written(seconds, 's')}" for role, seconds in turns.items())
        lines.append(
            f"turns: until its states are on the GPU, or in host memory again: {listed}; "
            f"{peaks.host * reached.host / 1e9:,.0f} GB/s each way for a GPU, and {reached.turn_s:g} s to "
            "sleep and wake (assumed)"
        )
    return lines


def _times(planned: Planned) -> Table:
    run = planned.simulated
    table = _wide_table("times; stages may overlap", "stage", "in a step", "of the step")
    for stage, seconds in run.stage_s.items():
        table.add_row(STAGES[stage], written(seconds, "s"), written(seconds / run.step_s, "%"))
    table.add_row("[bold]step", written(run.step_s, "s"), "")
    return table


def _summary(planned: Planned, setting: Setting) -> list[str]:
    """Describe rates, idle time and cost."""
    run, steps, cluster = planned.simulated, planned.option.config.steps, setting.cluster
    step_h, engines, policy = run.step_s / 3600, *(written(run.idle[r], "%") for r in ("rollout", "policy"))
    lines = [
        f"{run.tokens_per_s:,.0f} tokens/s ({run.completion_tokens_per_s:,.0f} of completions), "
        f"{run.samples / run.step_s:,.1f} samples/s; {steps} steps take {steps * step_h:,.1f} h",
        f"idle: engines {engines}, policy {policy}: {reason(planned)}",
        f"an engine decodes {run.sequences:,.0f} sequences at once on average, and could decode "
        f"{planned.option.scenario.capacity:,}",
        f"mean staleness: {run.staleness:.2f}",
    ]
    if cluster.card and cluster.price:
        price, unused = cluster.price, cluster.gpus - planned.option.roles.gpus
        lines.append(
            f"cost: ${cost_per_million(run, cluster):.3g} a million tokens, ${price * step_h:,.2f} a step, "
            f"${price * steps * step_h:,.0f} the run (steps alone), at ${cluster.card.price:g} an hour for "
            "each GPU" + (f" ({unused} of {cluster.gpus} are paid for but not used)" if unused else "")
        )
    return lines


def cost_per_million(run: Simulated, cluster: ClusterShape) -> float:
    """Return dollars per million tokens of prompts and completions; all GPUs of the cluster are paid for."""
    return cluster.price / 3600 / run.tokens_per_s * 1e6


def _cold_start(setting: Setting, config: Config) -> list[str]:
    """Describe the memory of supervised training, which ends before the workers start."""
    if config.sft is None or not is_trained_first(config.model, config.sft):
        return []
    sizes = Sizes.from_config(config, gpu=setting.cluster.card is not None)
    need = cold_start(config.sft, setting.model, sizes)
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in need.parts.items())
    lines = [
        f"cold start, before all workers: {need.total / GIB:.1f} GiB of one process with "
        f"{config.sft.batch_size} rows of `sft.max_length` = {config.sft.max_length} tokens ({parts})"
    ]
    problem = cold_start_problem(need, setting.cluster)
    more = "; `check` uses the real lengths of the rows"
    return lines + ([f"warning: {problem}{more}"] if problem else [])


def splits_lines(plan: Plan) -> list[str]:
    """Describe the best split, and for each placement and ZeRO stage the number of splits, the fastest, and
    its bottleneck; [] if none was tried.
    """
    if not plan.search.tried:
        return []
    lines = [_best(plan, plan.search.best)] if plan.search.best else []
    shares = "engines, policy, reference and reward models on the same GPUs"
    lines.append(f"tried at this batch and staleness, with TP 1, 2, 4 and 8 (colocated: {shares}):")
    for tried in plan.search.tried:
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
    fixed = "other batches and staleness, other ZeRO stages, `policy.offload`, `policy.sequence_parallel`, "
    fixed += "`weight_sync.mode`"
    if plan.shown.option.config.needs_reference:
        fixed += ", `reference.num_workers`"
    return [*lines, f"not tried: {fixed} (set them and plan again)"]


def _best(plan: Plan, best: Planned) -> str:
    c, run = best.option.config, best.simulated
    keys = (
        f"rollout.num_workers={c.rollout.num_workers} "
        f"rollout.tensor_parallel_size={c.rollout.tensor_parallel_size} "
        f"policy.num_workers={c.policy.num_workers} policy.zero_stage={c.policy.zero_stage} "
        f"cluster.placement={c.cluster.placement}"
    )
    gain = ""
    if plan.simulated:
        times = run.tokens_per_s / plan.simulated.simulated.tokens_per_s
        gain = f", {times:.2f} times the tokens a second of the configuration as it is"
    cost = ""
    if plan.setting.cluster.price:
        cost = f", ${cost_per_million(run, plan.setting.cluster):.3g} a million tokens"
    return (
        f"best split: {keys}: {written(run.step_s, 's')} a step, {run.tokens_per_s:,.0f} tokens/s{cost}{gain}"
        f"; {reason(best)}"
    )


def _wide_table(title: str, first: str, *others: str) -> Table:
    """Create a table whose columns are at least as wide as their headings' words."""
    table = make_table(title, (first, *others), left=(first, "parts"), bold=True)
    table.caption_justify = "left"
    for heading, column in zip(others, table.columns[1:], strict=True):
        column.min_width = max(map(len, heading.split()))
    return table
