"""What a calibrated plan takes from a benchmark, on made-up results."""

from dataclasses import replace

import pytest

from grpo_dist.config import Config
from grpo_dist.errors import UserError
from grpo_dist.tools.plan.accelerators import parse_cluster
from grpo_dist.tools.plan.calibration import calibrate
from grpo_dist.tools.plan.command import make_plan
from grpo_dist.tools.plan.memory import Sizes
from grpo_dist.tools.plan.options import Assumptions, build_setting, option_of, planned
from grpo_dist.tools.plan.rates import Rates
from tests.support.plans import model_of
from tests.tools.plan.test_plan import cpu_config, result


@pytest.mark.parametrize("changes", [
    {"policy": {"zero_stage": 0}},
    {"policy": {"zero_stage": 2}},
    {"policy": {"zero_stage": 3}},
    {"weight_sync": {"deltas": True}},
])  # fmt: skip
def test_the_weight_sync_of_the_benchmarks_own_configuration_takes_what_it_took(changes):
    c = cpu_config(**changes)
    measured = result(c)
    cal = calibrate(measured, parse_cluster("1x0xCPU"))
    cfg = Config.model_validate(measured.config)
    planned = Rates(cfg, model_of(cfg), Sizes.from_config(cfg, gpu=False), cal.peaks, cal.reached).sync_s()
    assert planned == pytest.approx(measured.figures["sync/step_s"])


def refusal(tmp_path, measured, **changes):
    """Return why a plan with the result ``measured`` is refused."""
    measured.write(tmp_path / "bench.json")
    with pytest.raises(UserError) as error:
        make_plan(cpu_config(**changes), "1x0xCPU", Assumptions(bench=tmp_path / "bench.json"))
    return str(error.value)


def test_a_benchmark_of_another_versions_configuration_is_refused_in_one_line(tmp_path):
    base = result(cpu_config())
    text = refusal(tmp_path, replace(base, config=base.config | {"gone": 1}))
    assert text.startswith("--bench: ") and "`gone`" in text and "measure again with this version" in text
    assert "\n" not in text


def test_prompts_of_a_benchmark_that_the_run_would_drop_are_refused(tmp_path):
    message = refusal(
        tmp_path, result(cpu_config()), data={"train": [{"path": "demo:add3"}], "max_prompt_tokens": 8}
    )
    assert "bench.json: its prompts have 16 tokens" in message and "`data.max_prompt_tokens` = 8" in message


@pytest.mark.parametrize("steps", [True, False])
def test_a_plan_of_a_benchmark_with_tools_waits_for_them_as_often(tmp_path, steps):
    """Three turns in a sample, with 0.6 s per turn on average: 0.9 s between two turns."""
    tools = {"data": {"train": [{"path": "demo:add3", "environment": "python"}]}}
    c = cpu_config(**tools)
    base = result(c)
    episodes = {"generation/step_s": 5.0, "episodes/turns": 3.0, "episodes/tool_wait_s": 0.6}
    measured = replace(base, figures=base.figures | episodes)
    if not steps:
        measured = replace(measured, decode_steps=[])
    measured.write(tmp_path / "bench.json")
    setting = build_setting(c, parse_cluster("1x0xCPU"), Assumptions(bench=tmp_path / "bench.json"))
    assert setting.workload.turns == 3 and setting.workload.tool_s == pytest.approx(0.9)
    run = planned(option_of(c, setting)).simulated
    others = sum(run.stage_s[stage] for stage in ("update", "sync")) + 0.1 + 0.05  # scores, overhead
    assert run.step_s - others == pytest.approx(5.0, rel=0.05)
