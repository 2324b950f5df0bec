"""Prices published runs from their published settings: as they ran, and with what this project adds.

    python -m grpo_dist.tools.plan.published             writes the tables of guides/published_runs.md
    python -m grpo_dist.tools.plan.published --check     exits with 1 where they are out of date

A stage is a file of `configs/published` on the GPUs that it ran on. Its price is that of its steps,
evaluations and checkpoints, at three mean lengths of completions, of which only some are published.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

from grpo_dist.config.files import changed, load_config
from grpo_dist.errors import UserError
from grpo_dist.runtime.files import write_text
from grpo_dist.runtime.generated import with_part
from grpo_dist.tools.plan.accelerators import parse_cluster
from grpo_dist.tools.plan.command import made_setting
from grpo_dist.tools.plan.heads import CONFIGS, digest_of
from grpo_dist.tools.plan.options import Option, option_or_reason, planned
from grpo_dist.tools.plan.phases import RunLengths, phases_of
from grpo_dist.tools.plan.sweep import bound
from grpo_dist.tools.plan.tail import VARIANTS as TAIL
from grpo_dist.tools.plan.whole_run import whole_run

GUIDE = Path(__file__).resolve().parents[2] / "guides/published_runs.md"
_HOUR_S = 3600.0
_WINDOW = 4  # steps of tail batching
_POOL = 20  # steps' prompts that a simulation draws from
MIDDLE = 1  # of the three lengths


@dataclass(frozen=True, slots=True)
class PublishedStage:
    """A file of `configs/published` without its ending. ``means``: tokens of completions, none above the cap,
    at least, likely and at most. ``rows``: of its data; ``begins_at``: steps of the run before it.
    """

    file: str
    cluster: str
    means: tuple[float, float, float]
    rows: int
    begins_at: int

    @property
    def name(self) -> str:
        return self.file.rpartition("_")[2]


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """``gpu_hours``: published, of the training alone."""

    name: str
    gpu_hours: float
    stages: tuple[PublishedStage, ...]


_POLARIS_MEANS = (10_000.0, 15_000.0, 20_000.0)  # assumed: none is published
_DEEPSCALER = 40_000  # rows: "approximately", of the card of its data set
_POLARIS = 53_000  # rows, as the name of its data set has it
RUNS = (
    PublishedRun(
        "DeepScaleR-1.5B",
        3_800,
        (
            PublishedStage("deepscaler_1.5b_8k", "1x8xA100-80GB", (3_000, 3_500, 4_500), _DEEPSCALER, 0),
            PublishedStage("deepscaler_1.5b_16k", "4x8xA100-80GB", (3_500, 4_500, 5_500), _DEEPSCALER, 1040),
            PublishedStage("deepscaler_1.5b_24k", "4x8xA100-80GB", (4_500, 5_500, 6_500), _DEEPSCALER, 1520),
        ),
    ),
    PublishedRun(
        "POLARIS-4B",
        0.33 * 700 * 32,  # hours a step, steps, GPUs: ChenxinAn-fdu/POLARIS#18
        tuple(
            PublishedStage(f"polaris_4b_{cap}", "4x8xH800", _POLARIS_MEANS, _POLARIS, begins_at)
            for cap, begins_at in (("40k", 0), ("48k", 234), ("52k", 467))
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class PriceVariant:
    """A row: changes of the published settings. ``accepted``: tokens a pass of engines with drafts gains,
    assumed. ``split``: the roles have GPUs of their own; of some splits that with the highest bound.
    ``ranged``: priced at all three lengths.
    """

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    accepted: float = 1.0
    split: bool = False
    ranged: bool = False

    @property
    def lengths(self) -> tuple[int, ...]:
        return (0, MIDDLE, 2) if self.ranged else (MIDDLE,)

    @property
    def steps(self) -> int:
        """Simulated steps: all of a window of tail batching, as many as `tail` for groups that are carried
        over, otherwise two.
        """
        if self.changes.get("batch.order") == "finished":
            return 2 * _WINDOW
        return _WINDOW if self.changes.get("data.order") == "length" else 2


_GRAPHS = {"rollout.enforce_eager": False}
_SHARED = {"model.packing": True}
_BY_LENGTH = {"data.order": "length", "data.length_window": _WINDOW}
_CARRIED = {k: v for k, v in TAIL["carry-over"].items() if k.startswith(("batch.", "weight_sync.", "max_"))}
_DRAFTS = {"rollout.speculation.tokens": 4, "rollout.speculation.max_sequences": 4}
_ACCEPTED = 1.5  # assumed: every second pass of a drained engine gains one token more
_DELTAS = {"weight_sync.deltas": True}
_ALL = _GRAPHS | _SHARED | _DRAFTS | _DELTAS
PRICE_VARIANTS = (
    PriceVariant("as published", ranged=True),
    PriceVariant("with CUDA graphs", _GRAPHS, ranged=True),
    PriceVariant("and shared prompts", _GRAPHS | _SHARED),
    PriceVariant("and tail batching", _GRAPHS | _BY_LENGTH),
    PriceVariant("and carry-over", _GRAPHS | _CARRIED, split=True),
    PriceVariant("and speculation", _GRAPHS | _DRAFTS, accepted=_ACCEPTED),
    PriceVariant("and deltas", _GRAPHS | _DELTAS),
    PriceVariant("all, with tail batching", _ALL | _BY_LENGTH, accepted=_ACCEPTED),
    PriceVariant("all, with carry-over", _ALL | _CARRIED, accepted=_ACCEPTED, split=True),
)


def before_cap(mean: float, sigma: float, cap: float) -> float:
    """Return the mean of a log-normal length before the cap that leaves a mean of ``mean`` tokens.

    With mu the mean of the log and z = (ln cap - mu) / sigma, E[min(L, cap)] =
    exp(mu + sigma^2 / 2) Phi(z - sigma) + cap (1 - Phi(z)). Raises UserError where the cap is too low.
    """
    if mean >= cap:
        raise UserError(f"mean = {mean:g} tokens: expected less than the cap of {cap:g}")
    low, high = mean, 2 * mean
    while after_cap(high, sigma, cap) < mean:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if after_cap(middle, sigma, cap) < mean else (low, middle)
    return high


def after_cap(mean: float, sigma: float, cap: float) -> float:
    """Return E[min(L, cap)] of a log-normal length L with ``mean``."""
    normal, z = NormalDist(), (math.log(cap / mean) + sigma**2 / 2) / sigma
    return mean * normal.cdf(z - sigma) + cap * (1 - normal.cdf(z))


@dataclass(frozen=True)
class PricedStage:
    """A stage with the changes of a variant, and a mean length. ``steps``: simulated; ``unknown_steps``: of
    the stage, in the run's first epoch.
    """

    option: Option
    gpus: int
    steps: int
    unknown_steps: int

    @classmethod
    def of(cls, stage: PublishedStage, variant: PriceVariant, length: int) -> PricedStage:
        """Raises UserError where the variant cannot run on the stage's GPUs."""
        config, cluster = load_config(CONFIGS / f"published/{stage.file}.yaml"), parse_cluster(stage.cluster)
        sigma, cap = config.bench.lengths.sigma or 1.0, config.sampling.longest
        config = changed(config, {"bench.lengths.mean": before_cap(stage.means[length], sigma, cap)})
        setting = made_setting(config, cluster)
        splits = _splits(cluster.gpus, config.needs_reference) if variant.split else [dict[str, Any]()]
        made = [option_or_reason(config, {**variant.changes, **split}, setting) for split in splits]
        fitting = [option for option in made if isinstance(option, Option)]
        if not fitting:
            raise UserError(f"{stage.file}, {variant.name}: {made[0]}")
        option = max(fitting, key=bound)
        rates = option.scenario.rates
        reached = replace(rates.reached, accepted=variant.accepted)
        warmup = 1 if option.config.max_staleness else 0
        scenario = replace(
            option.scenario, rates=replace(rates, reached=reached), warmup_steps=warmup, epoch_steps=_POOL
        )
        epoch = math.ceil(stage.rows / config.batch.prompts_per_step)
        unknown = max(0, min(epoch - stage.begins_at, config.steps))
        return cls(replace(option, scenario=scenario), cluster.gpus, variant.steps, unknown)

    @property
    def gpu_hours(self) -> float:
        """Simulate some steps, and return the GPU-hours of all of the stage."""
        made, lengths = planned(self.option, steps=self.steps), self.option.config.sampling
        phases = phases_of(made, RunLengths(lengths, self.unknown_steps))
        return self.gpus * whole_run(made, phases).seconds / _HOUR_S

    @property
    def digest(self) -> str:
        """Of what its price depends on, without simulating it."""
        known = digest_of(self.option)
        return f"{known} {self.unknown_steps}" if self.option.config.data.order == "length" else known


def _splits(gpus: int, reference: bool) -> list[dict[str, Any]]:
    """Return splits with a quarter, three eighths and half of the GPUs for the policy, and an eighth for the
    reference.
    """
    references = gpus // 8 if reference else 0
    return [
        {
            "cluster.placement": "separate",
            "policy.num_workers": gpus * eighths // 8,
            "rollout.num_workers": gpus - gpus * eighths // 8 - references,
            "reference.num_workers": max(1, references),
        }
        for eighths in (2, 3, 4)
    ]


def table(run: PublishedRun) -> Iterator[str]:
    """Yield the lines of a run's table. It simulates every row."""
    names = " | ".join(stage.name for stage in run.stages)
    yield f"| {run.name} | {names} | GPU-hours | of published | |"
    yield "|---|" + "---|" * (len(run.stages) + 3)
    for variant in PRICE_VARIANTS:
        hours = {
            length: [PricedStage.of(stage, variant, length).gpu_hours for stage in run.stages]
            for length in variant.lengths
        }
        cells, total = " | ".join(f"{each:,.0f}" for each in hours[MIDDLE]), sum(hours[MIDDLE])
        among = f" ({sum(hours[0]):,.0f} to {sum(hours[2]):,.0f})" if variant.ranged else ""
        yield (
            f"| {variant.name} | {cells} | {total:,.0f}{among} | {total / run.gpu_hours:.0%} | "
            f"`{row_digest(run, variant)}` |"
        )


def row_digest(run: PublishedRun, variant: PriceVariant) -> str:
    """Return a digest of what a row's price depends on, without simulating it."""
    priced = (PricedStage.of(stage, variant, length) for stage in run.stages for length in variant.lengths)
    known = [each.digest for each in priced]
    return hashlib.sha256(" ".join(known).encode()).hexdigest()[:8]


def stated_digests(text: str) -> list[str]:
    """Return the digests of all rows of a page, in their order."""
    return re.findall(r"\| `([0-9a-f]{8})` \|$", text, re.MULTILINE)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m grpo_dist.tools.plan.published", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 for stale tables")
    check = parser.parse_args(arguments).check
    text = now = GUIDE.read_text()
    for run in RUNS:
        now = with_part(now, run.name, "\n".join(table(run)))
    if now != text and not check:
        write_text(GUIDE, now)
    print(f"{GUIDE.name}: {'changed' if now != text else 'up to date'}")
    return int(check and now != text)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(str(error))
