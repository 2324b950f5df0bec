"""Stragglers: what each mitigation saves on two simulated engines."""

import numpy as np
import pytest

from grpo_dist import cli
from grpo_dist.config import LognormalLengths
from grpo_dist.config.files import changed
from grpo_dist.tools.bench.lengths import lengths_of
from grpo_dist.tools.plan.simulation import Scenario, simulate
from grpo_dist.tools.plan.tail import VARIANTS, sampling_limit_s
from grpo_dist.tools.plan.workload import Workload
from tests.support.fakes import config
from tests.support.plans import Times

LENGTHS = LognormalLengths(mean=100, sigma=1.0, prompt_share=0.5)


def test_a_share_of_the_lengths_variance_is_the_prompts_and_none_of_it_without_the_setting():
    logs = np.log([lengths_of(range(8 * p, 8 * p + 8), LENGTHS, cap=10**9, uid=f"p{p}") for p in range(2000)])
    within = logs.var(axis=1, ddof=1).mean()
    assert within == pytest.approx(0.5, rel=0.05) and logs.var() == pytest.approx(1.0, rel=0.08)
    plain = LognormalLengths(mean=100, sigma=1.0)
    assert lengths_of(range(5), plain, cap=1600, uid="p") == lengths_of(range(5), plain, cap=1600)


def two_engines(name, *, slots=64, steps=24, **changes):
    """Simulate 32 x 8 samples a step on two engines; the update takes half of the sampling limit."""
    base = config(
        batch={"prompts_per_step": 32, "samples_per_prompt": 8},
        rewards={"num_workers": 64},
        sampling={"max_new_tokens": 1600},
        rollout={"num_workers": 2},
    )
    planned = changed(base, dict(VARIANTS[name]) | changes)
    workload = Workload(20, LENGTHS, 1600)
    tokens = 32 * 8 * workload.mean
    times = Times(step=0.02, update=0.5 * tokens / (2 * slots) * 0.02, sync=0.05, score=0.01)
    scenario = Scenario(planned, times, workload, slots, steps=steps, epoch_steps=20)
    return scenario, simulate(scenario)


@pytest.mark.slow
def test_carry_over_is_a_third_faster_than_waiting_and_biases_no_length():
    _, waiting = two_engines("synchronous")
    _, carried = two_engines("carry-over")
    assert carried.tokens_per_s > 1.3 * waiting.tokens_per_s
    assert waiting.staleness == 0 < carried.staleness < 0.25
    assert abs(carried.length_bias) < 0.03  # groups that are still in flight after 25 steps


@pytest.mark.slow
def test_asynchronous_sampling_reaches_the_larger_limit():
    # Long enough to make the work in flight at both ends of the timed steps small: 0.986 of the limit.
    scenario, run = two_engines("asynchronous, 4 steps ahead", slots=32, steps=72)
    limit = max(
        sampling_limit_s(scenario, run.completion_tokens), run.stage_s["update"] + run.stage_s["sync"]
    )
    assert limit > 0.95 * run.step_s


@pytest.mark.slow
def test_the_command_prints_a_row_for_each_way_at_1024_gpus(capsys):
    wide = ["rollout.num_workers=768", "policy.num_workers=256", "batch.prompts_per_step=32"]
    small = [*wide, "batch.samples_per_prompt=8", "algorithm.kl.coef=0", "sampling.max_new_tokens=256"]
    recipe = "configs/gsm8k_qwen2.5_1.5b.yaml"
    assert cli.main(["plan", recipe, "--cluster", "128x8xH100", "--tail", *small]) == 0
    output = capsys.readouterr().out
    assert all(name in output for name in VARIANTS) and "768 engine(s)" in output
    assert "half of the variance of the log" in output
