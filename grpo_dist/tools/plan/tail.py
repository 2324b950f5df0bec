"""The cost of a step's stragglers, and the savings of long-tail mitigations: `grpo-dist plan --tail`.

    synchronous       a step waits for its longest sample
    tail batching     `data.order: length`: prompts with long answers share steps. Lengths are known from an
                      earlier epoch; the first epoch's steps are synchronous
    carry-over        `batch.order: completion`: a quarter more groups than a step takes are in flight; the
                      first to finish are trained, the others are one step late
    asynchronous      the next steps are sampled during the update

Each runs the real driver loop on simulated engines, with the same GPU split and log-normal lengths. The limit
of a step is sampling with all engine slots full, plus update and sync; asynchronous: the larger of the two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.console import Console

from grpo_dist.config import Config, LengthsConfig, LognormalLengths
from grpo_dist.errors import UserError
from grpo_dist.runtime.tables import print_lines, print_rows
from grpo_dist.tools.bench.table import written
from grpo_dist.tools.plan.options import Option, Setting, option_or_reason
from grpo_dist.tools.plan.report import cost_per_million
from grpo_dist.tools.plan.simulation import Scenario, Simulated, simulate

_SIGMA, _PROMPT_SHARE = 1.0, 0.5  # for reasoning models; assumed where `bench.lengths` is not log-normal
_WINDOW = 4  # steps of tail batching
_STEPS = 2 * _WINDOW  # whole windows, so that all window steps have equal weight
_POOL = 20  # pool of prompts in steps, the same for every mitigation
SYNCHRONOUS = {
    "max_staleness": 0, "batch.order": "launched", "data.order": "epochs",
    "cluster.placement": "separate",
}  # fmt: skip
_BY_LENGTH = {"data.order": {"name": "length", "window": _WINDOW}}
_CARRIED = {
    "max_staleness": 1, "weight_sync.mode": "keep", "batch.order": {"name": "completion", "oversample": 1.25}
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
    """One mitigation. ``limit_s``: seconds of a step with all slots full."""

    name: str
    run: Simulated
    limit_s: float

    @property
    def of_limit(self) -> float:
        return self.limit_s / self.run.step_s


def tail_setting(lengths: LengthsConfig, setting: Setting) -> tuple[Setting, str]:
    """Return ``setting`` with log-normal lengths, and their assumptions."""
    assumed = ""
    if not isinstance(lengths, LognormalLengths):
        mean = setting.workload.mean
        lengths = LognormalLengths(mean=mean, sigma=_SIGMA)
        assumed = f"assumed: completions log-normal with a mean of {mean:.0f} tokens before the cap, sigma 1"
    if lengths.prompt_share is None:
        lengths = lengths.model_copy(update={"prompt_share": _PROMPT_SHARE})
        share = "half of the variance of the log common to all samples of a prompt (bench.lengths)"
        assumed = f"{assumed}, {share}" if assumed else f"assumed: {share}"
    workload = replace(setting.workload, lengths=lengths, measured=())
    return replace(setting, workload=workload), assumed


def tail_rows(base: Option, setting: Setting) -> Iterator[TailRow]:
    """Simulate every mitigation on the split of ``base``. Raises UserError if one does not fit."""
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
        yield TailRow(name, run, max(sampling, training) if ahead else sampling + training)


def sampling_limit_s(scenario: Scenario, tokens: float) -> float:
    """Return the seconds for ``tokens`` with the number of full engine slots that maximises tokens per
    second.
    """
    workload, batch, engines = scenario.workload, scenario.config.batch, scenario.config.rollout.num_workers
    samples = batch.prompts_per_step * batch.samples_per_prompt / engines
    cached_tokens = workload.prompt_tokens / batch.samples_per_prompt + workload.mean / 2
    counts = np.unique(np.geomspace(1, max(1.0, min(scenario.capacity, 2 * samples)), 16).round())
    rate = max(n / scenario.rates.decode_step_s(n, n * cached_tokens) for n in counts.tolist())
    return tokens / (rate * engines)


def print_tail(config: Config, setting: Setting) -> None:
    """Print each mitigation's result. Raises UserError if nothing fits."""
    console = Console(highlight=False)
    base = option_or_reason(config, SYNCHRONOUS, setting)
    if isinstance(base, str):
        raise UserError(f"--tail: expected a split with separate GPUs per role, but {base}")
    setting, assumed = tail_setting(config.bench.lengths, setting)
    rows = list(tail_rows(base, setting))
    first, cluster = rows[0].run, setting.cluster
    cells = [
        [
            row.name,
            written(row.run.step_s, "s"),
            f"{row.run.tokens_per_s / first.tokens_per_s:.2f}x",
            written(row.limit_s, "s"),
            f"{row.of_limit:.0%}",
            written(row.run.stage_s["sample"], "s"),
            f"{row.run.staleness:.2f}",
            "" if math.isnan(row.run.length_bias) else f"{row.run.length_bias:+.1%}",
            f"{cost_per_million(row.run, cluster):.3g}",
        ]
        for row in rows
    ]
    headings = (
        "", "step", "tokens/s", "limit", "of limit", "sampling", "staleness", "length bias", "$/M tokens",
    )  # fmt: skip
    print_rows(console, f"long-tail mitigations on {cluster}", headings, cells)
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
