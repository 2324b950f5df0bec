"""The tail of a step: its formula against Monte Carlo, and what each way saves on two simulated engines."""

import heapq
import io
import math

import numpy as np
import pytest
from rich.console import Console

from grpo_dist import cli
from grpo_dist.config import LengthsConfig
from grpo_dist.config.files import changed
from grpo_dist.tools.bench.lengths import length_of
from grpo_dist.tools.plan.command import make_plan
from grpo_dist.tools.plan.report import print_plan
from grpo_dist.tools.plan.scenario import Scenario
from grpo_dist.tools.plan.simulation import simulate
from grpo_dist.tools.plan.tail import VARIANTS, formula_s, sampling_limit_s
from grpo_dist.tools.plan.tail_formula import TailLengths, no_tail_steps, tail_steps
from grpo_dist.tools.plan.workload import Workload
from tests.support.fakes import config
from tests.support.made_times import Times

LENGTHS = LengthsConfig(kind="lognormal", mean=100, sigma=1.0, prompt_share=0.5)


def drawn_steps(lengths, prompts, samples, slots, window, runs):
    """Return the mean steps of ``runs`` windows, and its standard error: each slot takes the next sample."""
    rng, found = np.random.default_rng(0), []
    middle = math.log(lengths.mean) - lengths.sigma**2 / 2
    own, common = math.sqrt(1 - lengths.prompt_share), math.sqrt(lengths.prompt_share)
    for _ in range(runs):
        z = np.sort(rng.standard_normal(prompts * window))
        noise = rng.standard_normal((prompts * window, samples))
        tokens = np.minimum(np.exp(middle + lengths.sigma * (common * z[:, None] + own * noise)), lengths.cap)
        steps = []
        for step in tokens.reshape(window, -1):
            free = [0.0] * slots
            for length in rng.permutation(step).tolist():
                heapq.heapreplace(free, free[0] + length)
            steps.append(max(free))
        found.append(np.mean(steps))
    return float(np.mean(found)), float(np.std(found) / math.sqrt(runs))


@pytest.mark.parametrize(
    ("share", "slots", "window"),
    [(0.0, 256, 1), (0.5, 256, 1), (0.0, 64, 1), (0.5, 64, 1), (0.5, 256, 4), (0.5, 64, 4), (0.9, 64, 8)],
)
def test_the_formula_of_the_tail_agrees_with_monte_carlo(share, slots, window):
    lengths = TailLengths(100.0, 1.0, 1600, share)
    expected, error = drawn_steps(lengths, 32, 8, slots, window, 160 // window)
    found = tail_steps(lengths, prompts=32, samples=8, slots=slots, window=window)
    assert found == pytest.approx(expected, rel=0.05, abs=3 * error)
    whole = no_tail_steps(lengths, prompts=32, samples=8, slots=slots)
    assert whole == pytest.approx(32 * 8 * 99.6 / slots, rel=0.01) and whole < found


@pytest.mark.parametrize("rows", [32, None])
def test_a_plan_has_the_first_epoch_of_tail_batching_where_it_can_count_its_prompts(tmp_path, rows):
    path = tmp_path / "train.jsonl"
    path.write_text("".join(f'{{"problem": "q{i}", "answer": "{i}"}}\n' for i in range(64)))
    source = {"path": str(path)} if rows else {"path": "nowhere/math"}
    planned = config(
        model={"path": "Qwen/Qwen2.5-0.5B", "gradient_checkpointing": True},
        data={"train": [source | {"max_rows": rows}], "order": "length", "length_window": 2},
        batch={"prompts_per_step": 8, "samples_per_prompt": 4},
        policy={"zero_stage": 2},
        bench={"lengths": {"kind": "lognormal", "mean": 100, "sigma": 1.0, "prompt_share": 0.9}},
        sampling={"max_new_tokens": 2000},
        steps=10,
    )
    made = make_plan(planned, "1x2xH100", splits="none")
    found = [(phase.steps, phase.in_first_epoch) for phase in made.whole.phases]
    assert found == ([(4, True), (6, False)] if rows else [(10, False)])
    console = Console(record=True, width=200, file=io.StringIO())
    print_plan(made, console)
    text = " ".join(console.export_text().split())
    assert ("cannot be counted here" in text) == (rows is None)
    assert ("in the first epoch, whose lengths are unknown" in text) == (rows is not None)


def test_equal_lengths_have_no_tail_and_tail_batching_of_unpredictable_ones_saves_nothing():
    equal = TailLengths(100.0, 1e-6, 1600)
    assert tail_steps(equal, prompts=4, samples=2, slots=8) == pytest.approx(100.0, rel=0.01)
    noise = TailLengths(100.0, 1.0, 1600, 0.0)
    own = {"prompts": 32, "samples": 8, "slots": 256}
    assert tail_steps(noise, **own, window=8) == pytest.approx(tail_steps(noise, **own), rel=1e-6)


def test_a_share_of_the_lengths_variance_is_the_prompts_and_none_of_it_without_the_setting():
    logs = np.log(
        [[length_of(8 * p + i, LENGTHS, cap=10**9, uid=f"p{p}") for i in range(8)] for p in range(2000)]
    )
    within = logs.var(axis=1, ddof=1).mean()
    assert within == pytest.approx(0.5, rel=0.05) and logs.var() == pytest.approx(1.0, rel=0.08)
    plain = LengthsConfig(kind="lognormal", mean=100, sigma=1.0)
    assert [length_of(seed, plain, cap=1600, uid="p") for seed in range(5)] == [
        length_of(seed, plain, cap=1600) for seed in range(5)
    ]


def two_engines(name, *, slots=64, steps=24, **changes):
    """Simulate 32 x 8 samples a step on two engines; the update takes half of the limit of sampling."""
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
    synchronous, waiting = two_engines("synchronous")
    _, carried = two_engines("carry-over")
    assert carried.tokens_per_s > 1.3 * waiting.tokens_per_s
    assert waiting.staleness == 0 < carried.staleness < 0.25
    assert abs(carried.length_bias) < 0.03  # groups that are still on their way after 25 steps
    # With two samples a slot the formula is high, by a sixth at most.
    own = TailLengths(100.0, 1.0, 1600, 0.5)
    steps = tail_steps(own, prompts=32, samples=8, slots=128)
    assert formula_s(synchronous) == pytest.approx(0.02 * steps)


@pytest.mark.slow
def test_asynchronous_sampling_reaches_the_larger_limit():
    scenario, run = two_engines("asynchronous, 4 steps ahead", slots=32)
    limit = max(
        sampling_limit_s(scenario, run.completion_tokens), run.stage_s["update"] + run.stage_s["sync"]
    )
    assert limit > 0.95 * run.step_s


def test_tail_batching_saves_waiting_where_prompts_have_lengths_of_their_own():
    _, plain = two_engines("synchronous", slots=128, steps=8)
    _, sorted_ = two_engines("tail batching", slots=128, steps=8)
    assert sorted_.tokens_per_s > 1.2 * plain.tokens_per_s and sorted_.staleness == 0


@pytest.mark.slow
def test_the_command_prints_a_row_for_each_way_at_1024_gpus(capsys):
    wide = ["rollout.num_workers=768", "policy.num_workers=256", "batch.prompts_per_step=32"]
    small = [*wide, "batch.samples_per_prompt=8", "algorithm.kl.coef=0", "sampling.max_new_tokens=256"]
    recipe = "configs/gsm8k_qwen2.5_1.5b.yaml"
    assert cli.main(["plan", recipe, "--cluster", "128x8xH100", "--tail", *small]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in VARIANTS) and "768 engine(s)" in shown
    assert "half of the variance of the log" in shown
