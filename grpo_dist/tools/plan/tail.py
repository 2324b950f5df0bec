"""The price of a step's longest samples, and what each way to deal with them saves: `grpo-dist plan --tail`.

    synchronous       a step waits for its longest sample
    tail batching     `data.order: length`: prompts with long answers share steps. Lengths are known from an
                      epoch before; in a run's first epoch its steps are synchronous ones
    carry-over        `batch.order: finished`: a quarter more groups than a step takes are on their way, the
                      first to be done are trained, the others are one step late
    asynchronous      the next steps are sampled during the update

Each is the real driver loop on simulated engines, on the same split of the GPUs, with log-normal lengths. The
limit of a step has all slots of all engines full, then the update and the sync; asynchronous: the larger of
the two. `tail_formula` has the synchronous rows in closed form.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.console import Console

from grpo_dist.config import LengthsConfig
from grpo_dist.errors import UserError
from grpo_dist.runtime.tables import print_lines, print_rows
from grpo_dist.tools.bench.table import written
from grpo_dist.tools.plan.options import Option, Setting, option_or_reason
from grpo_dist.tools.plan.report_splits import cost_per_million
from grpo_dist.tools.plan.scenario import Scenario
from grpo_dist.tools.plan.simulation import Simulated, simulate
from grpo_dist.tools.plan.tail_formula import TailLengths, tail_steps

_SIGMA, _PROMPT_SHARE = 1.0, 0.5  # of reasoning models; assumed where `bench.lengths` is not log-normal
_WINDOW = 4  # steps of tail batching
_STEPS = 2 * _WINDOW  # simulated, so that every step of a window counts alike
_POOL = 20  # steps' prompts to draw from: the same for every way
SYNCHRONOUS = {
    "max_staleness": 0, "batch.order": "launched", "batch.oversample": None, "data.order": "epochs",
    "data.length_window": None, "cluster.placement": "separate",
}  # fmt: skip
_BY_LENGTH = {"data.order": "length", "data.length_window": _WINDOW}
_CARRIED = {
    "max_staleness": 1, "weight_sync.mode": "keep", "batch.order": "finished", "batch.oversample": 1.25
}  # fmt: skip
_AHEAD = {"weight_sync.mode": "keep"}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "synchronous": SYNCHRONOUS,
    "tail batching": SYNCHRONOUS | _BY_LENGTH,
    "carry-over": SYNCHRONOUS | _CARRIED,
    "asynchronous, 1 step ahead": SYNCHRONOUS | _AHEAD | {"max_staleness": 1},
    "asynchronous, 4 steps ahead": SYNCHRONOUS | _AHEAD | {"max_staleness": 4},
}


@dataclass(frozen=True, slots=True)
class TailRow:
    """One way. ``limit_s``: of a step with all slots full. ``formula_s``: of sampling, where it is known."""

    name: str
    run: Simulated
    limit_s: float
    formula_s: float | None

    @property
    def of_limit(self) -> float:
        return self.limit_s / self.run.step_s


def tail_setting(lengths: LengthsConfig, setting: Setting) -> tuple[Setting, str]:
    """Return ``setting`` with log-normal lengths, and what of them is assumed."""
    assumed = ""
    if lengths.kind != "lognormal":
        mean = setting.workload.mean
        lengths = LengthsConfig(kind="lognormal", mean=mean, sigma=_SIGMA)
        assumed = f"assumed: completions log-normal with a mean of {mean:.0f} tokens before the cap, sigma 1"
    if lengths.prompt_share is None:
        lengths = lengths.model_copy(update={"prompt_share": _PROMPT_SHARE})
        share = "half of the variance of the log common to all samples of a prompt (bench.lengths)"
        assumed = f"{assumed}, {share}" if assumed else f"assumed: {share}"
    workload = replace(setting.workload, lengths=lengths, measured=())
    return replace(setting, workload=workload), assumed


def tail_rows(base: Option, setting: Setting) -> Iterator[TailRow]:
    """Simulate every way on the split of ``base``. Raises UserError where one does not fit."""
    for name, changes in VARIANTS.items():
        option = option_or_reason(base.config, changes, setting)
        if isinstance(option, str):
            raise UserError(f"{name}: {option}")
        warmup = 1 if option.config.max_staleness else 0
        scenario = replace(option.scenario, steps=_STEPS, warmup_steps=warmup, epoch_steps=_POOL)
        run = simulate(scenario)
        sampling = sampling_limit_s(scenario, run.completion_tokens)
        training = run.stage_s["update"] + run.stage_s["sync"]
        ahead = name.startswith("asynchronous")
        limit = max(sampling, training) if ahead else sampling + training
        yield TailRow(name, run, limit, formula_s(scenario) if option.config.max_staleness == 0 else None)


def step_s(scenario: Scenario) -> tuple[float, int]:
    """Return the seconds of a decode step with full slots, and the slots of an engine: as many as give the
    most tokens a second.
    """
    workload, batch = scenario.workload, scenario.config.batch
    samples = batch.prompts_per_step * batch.samples_per_prompt / scenario.config.rollout.num_workers
    held = workload.prompt_tokens / batch.samples_per_prompt + workload.mean / 2
    counts = np.unique(np.geomspace(1, max(1.0, min(scenario.capacity, 2 * samples)), 16).round())
    rates = {int(n): n / scenario.rates.decode_step_s(n, n * held) for n in counts.tolist()}
    best = max(rates, key=lambda n: rates[n])
    return best / rates[best], best


def sampling_limit_s(scenario: Scenario, tokens: float) -> float:
    """Return the seconds of ``tokens`` with all slots of all engines full."""
    seconds, slots = step_s(scenario)
    return tokens * seconds / (slots * scenario.config.rollout.num_workers)


def formula_s(scenario: Scenario) -> float | None:
    """Return the seconds of sampling by `tail_formula` with a decode step's seconds at full slots."""
    lengths, config = scenario.workload.lengths, scenario.config
    if lengths.kind != "lognormal" or lengths.mean is None:
        return None
    own = TailLengths(lengths.mean, lengths.sigma or 1.0, scenario.workload.cap, lengths.prompt_share or 0.0)
    seconds, slots = step_s(scenario)
    window = (config.data.length_window or 8) if config.data.order == "length" else 1
    slots = min(scenario.capacity, slots) * config.rollout.num_workers
    batch = config.batch
    return seconds * tail_steps(
        own, prompts=batch.prompts_per_step, samples=batch.samples_per_prompt, slots=slots, window=window
    )


def print_tail(base: Option, setting: Setting, console: Console | None = None) -> None:
    """Print what each way gives. Raises UserError where nothing fits."""
    console = console or Console(highlight=False)
    setting, assumed = tail_setting(base.config.bench.lengths, setting)
    rows = list(tail_rows(base, setting))
    first, cluster = rows[0].run, setting.cluster
    cells = [
        [
            row.name,
            written(row.run.step_s, "s"),
            f"{row.run.tokens_per_s / first.tokens_per_s:.2f}x",
            written(row.limit_s, "s"),
            f"{row.of_limit:.0%}",
            written(row.formula_s, "s") if row.formula_s is not None else "",
            written(row.run.stage_s["sample"], "s"),
            f"{row.run.staleness:.2f}",
            "" if math.isnan(row.run.length_bias) else f"{row.run.length_bias:+.1%}",
            f"{cost_per_million(row.run, cluster):.3g}",
        ]
        for row in rows
    ]
    headings = (
        "", "step", "tokens/s", "limit", "of limit", "formula", "sampling", "staleness", "length bias",
        "$/M tokens",
    )  # fmt: skip
    print_rows(console, f"the tail on {cluster}", headings, cells)
    c = base.config
    print_lines(
        console,
        [
            f"{c.rollout.num_workers} engine(s) x TP {c.rollout.tensor_parallel_size}, "
            f"{c.policy.num_workers} rank(s) of ZeRO-{c.policy.zero_stage}; {c.batch.prompts_per_step} x "
            f"{c.batch.samples_per_prompt} samples a step",
            *([assumed] if assumed else []),
            "tail batching: with the lengths of an epoch before; in the first epoch a step is as synchronous",
        ],
    )
