"""`grpo-dist plan` with engines that join: what each number of them gives."""

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from grpo_dist.config.files import load_config
from grpo_dist.tools.plan.command import make_plan
from grpo_dist.tools.plan.elastic import _counts, elastic_lines, elastic_runs
from grpo_dist.tools.plan.report import print_plan

GPU = str(Path(__file__).resolve().parents[3] / "configs/gsm8k_qwen2.5_1.5b.yaml")


@pytest.mark.parametrize(
    "least, most, rows",
    [(1, 1, [1]), (1, 3, [1, 2, 3]), (2, 8, [2, 4, 8]), (1, 1000, [1, 2, 4, 8, 1000])],
)
def test_the_rows_double_and_end_with_the_most_engines(least, most, rows):
    assert _counts(least, most) == rows


def plan(*overrides):
    own = ["policy.num_workers=4", "cluster.placement=separate", *overrides]
    return make_plan(load_config(GPU, own), "1x8xH100", splits="none")


@pytest.mark.slow
def test_a_plan_prices_each_number_of_engines_that_may_serve():
    made = plan("rollout.num_workers={min: 1, max: 3}")
    price = made.setting.cluster.card.price
    every = elastic_lines(made.simulated, made.whole, price=price)
    lines = every[:3]
    assert [line.split(" engine(s)")[0] for line in lines] == [f"elastic: {n}" for n in (1, 2, 3)]
    seconds = [float(line.split(": ")[2].split(" s a step")[0].replace(",", "")) for line in lines]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]
    cost = [float(line.split("; ")[1].split()[0].replace(",", "")) for line in lines]
    held = [made.simulated.option.roles.gpus + extra for extra in (0, 1, 2)]
    assert cost == pytest.approx([gpus * s for gpus, s in zip(held, seconds, strict=True)], rel=0.02)
    console = Console(width=200, record=True, file=io.StringIO())
    print_plan(made, console)
    printed = " ".join(console.export_text().split())
    assert [line for line in every if line not in printed] == []
    first, *_, last, left_out = every[3:]
    hours = made.whole.seconds / 3600
    gpus = made.simulated.option.roles.gpus
    assert first.startswith(f"elastic, the whole run: 1 engine(s) throughout: {hours:,.2f} h, ")
    assert first.endswith(f"{gpus * hours:,.1f} GPU-hours, ${price * gpus * hours:,.2f}")
    assert "3 throughout" in last and "less time" in last and "of the price" in last
    assert "left out" in left_out
    assert "3 for 50% of the time" in every[5]


@pytest.mark.slow
def test_a_fixed_number_of_engines_has_no_such_rows():
    made = plan("rollout.num_workers=2")
    assert elastic_lines(made.simulated, made.whole, price=1.0) == []


def test_hours_and_gpu_hours_by_the_share_of_the_time_with_all_engines():
    """Ten hours of steps, and half as long with all engines; an hour of evaluations beside them."""
    whole = SimpleNamespace(steps_s=36_000.0, overhead_s=3_600.0)
    runs = {run.share: run for run in elastic_runs(whole, 0.5, gpus=4, extra=8)}
    assert [runs[share].hours for share in (0.0, 0.5, 1.0)] == pytest.approx([11.0, 10 / 1.5 + 1, 6.0])
    held = [runs[share].gpu_hours for share in (0.0, 0.5, 1.0)]
    assert held == pytest.approx([44.0, 8 * (10 / 1.5 + 1), 72.0])
    # Throughout: 8 GPUs for 6 hours at a price that makes up for 5 hours of 4 GPUs.
    assert [runs[share].even for share in (0.0, 1.0)] == pytest.approx([0.0, 20 / 48])
    assert 4 * 6.0 + 8 * 6.0 * runs[1.0].even == pytest.approx(44.0)
