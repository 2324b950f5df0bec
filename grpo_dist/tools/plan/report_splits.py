"""Prints which splits of the GPUs were tried, the fastest of each placement, and what bounds it."""

from __future__ import annotations

from rich.table import Table

from grpo_dist.runtime.tables import make_table
from grpo_dist.tools.bench.table import written
from grpo_dist.tools.plan.accelerators import ClusterShape
from grpo_dist.tools.plan.bottleneck import reason
from grpo_dist.tools.plan.result import Plan
from grpo_dist.tools.plan.simulation import Simulated


def cost_per_million(run: Simulated, cluster: ClusterShape) -> float:
    """Return dollars per million tokens of prompts and completions; all GPUs of the cluster are paid for."""
    return cluster.price / 3600 / run.tokens_per_s * 1e6


def splits_table(plan: Plan) -> Table:
    """Show the best split of each batch and staleness."""
    cluster = plan.setting.cluster
    table = wide_table(
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


def splits_lines(plan: Plan) -> list[str]:
    """Describe the best split, and what was tried."""
    return [*([_why(plan)] if plan.found else []), *_tried(plan)]


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
    if plan.is_own:
        return f"best at this batch and staleness: {keys}{gain}; {reason(chosen)}"
    cell = f"batch.prompts_per_step={c.batch.prompts_per_step} max_staleness={c.max_staleness}"
    return f"best at another batch and staleness: {cell} {keys}{gain}; {reason(chosen)}"


def _tried(plan: Plan) -> list[str]:
    """Describe the splits of each placement and ZeRO stage: how many, the fastest, and what bounds it; []
    where none was tried.
    """
    if not plan.tried:
        return []
    shares = "engines, policy, reference and reward models on the same GPUs"
    lines = [f"tried at this batch and staleness, with TP 1, 2, 4 and 8 (colocated: {shares}):"]
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
    fixed += ["`reference.num_workers`"] if plan.needs_reference else []
    return [*lines, f"not tried: other batches and staleness (--sweep does); {', '.join(fixed)} (set them)"]


def wide_table(title: str, first: str, *others: str) -> Table:
    """Make a table whose columns are at least as wide as the words of their headings."""
    table = make_table(title, (first, *others), left=(first, "parts"), bold=True)
    table.caption_justify = "left"
    for heading, column in zip(others, table.columns[1:], strict=True):
        column.min_width = max(map(len, heading.split()))
    return table
