"""What a calibrated plan takes from a benchmark, on made results."""

import pytest

from grpo_dist.config import Config
from grpo_dist.tools.plan.accelerators import parse_cluster
from grpo_dist.tools.plan.calibration import calibrate
from grpo_dist.tools.plan.memory import Sizes
from grpo_dist.tools.plan.rates import Rates
from tests.support.planned_models import model_of
from tests.tools.plan.test_plan import cpu_config, result


def test_turns_on_processors_are_part_of_the_overhead_of_a_step():
    measured = result(cpu_config())
    turns = {"share/turns": 0.02, "loop/step_s": 10.0}
    more = calibrate(result(cpu_config(), figures=measured.figures | turns), parse_cluster("1x0xCPU"))
    assert more.reached.overhead_s == pytest.approx(0.05 + 0.2)
    assert calibrate(measured, parse_cluster("1x0xCPU")).reached.overhead_s == pytest.approx(0.05)


@pytest.mark.parametrize(
    "changes",
    [
        {"policy": {"zero_stage": 0}},
        {"policy": {"zero_stage": 2}},
        {"policy": {"zero_stage": 3}},
        {"weight_sync": {"deltas": True}},
    ],
)
def test_the_weight_sync_of_the_benchmarks_own_configuration_takes_what_it_took(changes):
    c = cpu_config(**changes)
    measured = result(c)
    made = calibrate(measured, parse_cluster("1x0xCPU"))
    own = Config.model_validate(measured.config)
    planned = Rates(own, model_of(own), Sizes.of(own, gpu=False), made.peaks, made.reached).sync_s()
    assert planned == pytest.approx(measured.figures["sync/step_s"])
