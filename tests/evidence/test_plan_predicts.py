"""`grpo-dist plan` against measurements on this machine: calibrated by one benchmark, it predicts benchmarks
with other lengths, batches and staleness. And its memory and checkpoint sizes against the tensors that real
ZeRO ranks hold and the files they write.

    python -m pytest -s tests/evidence/test_plan_predicts.py

About ten minutes on two idle cores.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_dist.config.files import load_config
from grpo_dist.tools.bench.result import BenchResult
from grpo_dist.tools.bench.run import bench
from grpo_dist.tools.plan.command import make_plan
from grpo_dist.tools.plan.memory import Sizes, rank_bytes, states
from grpo_dist.tools.plan.models import from_config_json
from grpo_dist.tools.plan.options import Assumptions
from tests.support.fakes import config
from tests.support.patience import HANG_S

pytestmark = pytest.mark.evidence

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ROOT / "configs/bench/cpu_13m_lognormal.yaml"
SHORT = ["bench.steps=4", "bench.warmup_steps=1"]
CALIBRATION = ["batch.prompts_per_step=8"]
OTHERS = {
    "even": ["bench.lengths={kind: fixed, tokens: 64}", "batch.prompts_per_step=8"],
    "longer": ["bench.lengths={kind: lognormal, mean: 64, sigma: 0.5}", "batch.samples_per_prompt=16",
               "batch.prompts_per_step=4"],
    "larger": ["bench.lengths={kind: fixed, tokens: 96}", "batch.prompts_per_step=16"],
    "ahead": ["bench.lengths={kind: fixed, tokens: 64}", "batch.prompts_per_step=8",
              "max_staleness=1"],
}  # fmt: skip


@pytest.fixture(scope="module")
def calibration(tmp_path_factory):
    directory = tmp_path_factory.mktemp("calibration")
    overrides = [*SHORT, *CALIBRATION, f"output_dir={directory}"]
    return bench(load_config(MEASURED, overrides)) / "bench.json"


@pytest.mark.parametrize("case", OTHERS)
def test_a_plan_predicts_the_measured_times(case, calibration, tmp_path):
    settings = load_config(MEASURED, [*SHORT, *OTHERS[case], "bench.limits=false", f"output_dir={tmp_path}"])
    measured = BenchResult.read(bench(settings) / "bench.json").figures
    run = make_plan(settings, "1x0xCPU", Assumptions(bench=calibration), splits=False).simulated.simulated
    stages = {"sample": "generation/step_s", "update": "training/step_s", "sync": "sync/step_s"}
    for stage, figure in stages.items():
        print(f"{case}: {stage} planned {run.stage_s[stage]:.2f} s, measured {measured[figure]:.2f} s")
    off = run.step_s / measured["loop/step_s"] - 1
    print(f"{case}: step planned {run.step_s:.2f} s, measured {measured['loop/step_s']:.2f} s: {off:+.1%}")
    assert abs(off) < 0.15


def test_ranks_hold_and_write_the_planned_bytes():
    script = Path(__file__).with_name("rank_memory.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=HANG_S)
    cases = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"dtype"')]
    assert len(cases) == 7, done.stderr[-2000:]
    from rank_memory import BUCKET, RANKS, SHAPE

    model = from_config_json(SHAPE | {"model_type": "qwen2"}, "made")
    for case in cases:
        policy = {"num_workers": RANKS, "zero_stage": case["stage"]}
        settings = config(model={"path": "made", "dtype": case["dtype"]}, policy=policy)
        sizes = Sizes.from_config(settings, gpu=False)
        parts = states(settings.policy, model, sizes)
        if case["dtype"] == "float32" and case["stage"] == 1:
            # Whole gradients are freed after their reduction; the plan counts the moment before.
            parts["gradients"] -= 4 * model.parameters
        bucket = BUCKET * sizes.itemsize if case["stage"] == 3 else 0  # the bucket remains
        planned = sum(parts.values()) + bucket
        print(f"{case['dtype']} stage {case['stage']}: planned {planned:,}, held {case['bytes']:,} bytes")
        assert case["bytes"] == pytest.approx(planned, rel=0.02)
        written = rank_bytes(settings.policy, model, sizes)
        print(f"{case['dtype']} stage {case['stage']}: planned {written}, written {case['files']} bytes")
        assert case["files"] == pytest.approx(written, rel=0.01, abs=100_000)  # next to names and settings
