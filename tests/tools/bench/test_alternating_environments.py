"""Benchmarks of pairs: which steps have the other arguments, how pairs are divided, and what is refused."""

import asyncio
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from grpo_dist import driver
from grpo_dist.config import DataSourceConfig
from grpo_dist.tools.bench import slow_tools
from grpo_dist.tools.bench.alternate import AlternatingEnvironments, divide, is_other, pair_figures
from grpo_dist.tools.bench.record import BenchRecorder, NoCheckpoints, StepRecord
from grpo_dist.tools.bench.result import BenchResult
from grpo_dist.tools.bench.run import _check_other_kwargs, as_benchmark, timed
from grpo_dist.tools.bench.table import FIGURES, print_result
from grpo_dist.types import Task
from tests.support.fakes import World, config, prompts

SLOW = "grpo_dist.tools.bench.slow_tools:SlowTool"
EPISODES = {"train": [{"path": "demo:add3", "environment": SLOW}]}


def recorded(seconds):
    begin, made = 0.0, []
    for number, own in enumerate(seconds, 1):
        made.append(StepRecord(number, begin, begin + own, {}, {}, ()))
        begin += own
    return made


def test_pairs_change_their_order_and_warm_up_has_both_kinds():
    assert [is_other(batch, 2) for batch in range(10)] == [False, True] + [False, True, True, False] * 2
    assert [is_other(batch, 1) for batch in range(5)] == [True, False, True, True, False]


@pytest.mark.parametrize("warmup", [1, 2, 3])
def test_each_pair_has_one_step_of_each_kind(warmup):
    kinds = [is_other(batch, warmup) for batch in range(warmup, warmup + 12)]
    steps = recorded([2.0 if other else 3.0 for other in kinds])
    own, others = divide(steps)
    assert len(own) == len(others) == 6
    assert {step.seconds for step in own} == {3.0} and {step.seconds for step in others} == {2.0}
    assert all(abs(a.step - b.step) == 1 for a, b in zip(own, others, strict=True))


def test_a_machine_that_becomes_steadily_slower_does_not_move_the_ratio():
    """Steps take 1.1 and 1.0 of what the machine needs, which grows by 1 % from step to step."""
    needed = [1.01**i for i in range(8)]
    steps = recorded([n * (1.0 if is_other(i, 0) else 1.1) for i, n in enumerate(needed)])
    found = pair_figures(*divide(steps))
    assert found["pairs/step_ratio"] == pytest.approx(1.1, rel=1e-4)
    assert found["pairs/step_ratio_mean"] == pytest.approx(1.1, rel=1e-4)
    assert found["pairs/median_ratio"] == pytest.approx(1.1, rel=0.01)
    assert set(found) <= set(FIGURES)


def test_one_odd_step_does_not_move_the_ratio_of_medians_and_noise_widens_its_spread():
    """Seven pairs of 1.1 and 1.0 s; in an eighth the machine is busy with something else."""
    even = [1.0 if is_other(i, 0) else 1.1 for i in range(16)]
    odd = [*even[:15], 9.9]
    same, found = (pair_figures(*divide(recorded(seconds))) for seconds in (even, odd))
    ends = ("pairs/median_ratio_low", "pairs/median_ratio", "pairs/median_ratio_high")
    assert [same[name] for name in ends] == pytest.approx([1.1] * 3)
    assert found["pairs/median_ratio"] == pytest.approx(1.1)
    assert found["pairs/step_ratio_mean"] == pytest.approx((7 * 1.1 + 9.9) / 8)
    noisy = [own * (1 + 0.1 * (i % 5 - 2)) for i, own in enumerate(even)]
    low, middle, high = (pair_figures(*divide(recorded(noisy)))[name] for name in ends)
    assert 0.8 < low < middle < high < 1.5
    assert pair_figures(*divide(recorded(noisy))) == pair_figures(*divide(recorded(noisy))), "a fixed seed"


def test_pairs_are_printed_with_their_spread_and_the_extra_time_of_engines():
    steps = recorded([1.0 if is_other(i, 0) else 1.1 for i in range(4)])
    longer = [{"time/rollout_sample_busy_s": 0.4 if is_other(i, 0) else 0.6} for i in range(4)]
    own, others = divide([replace(step, metrics=m) for step, m in zip(steps, longer, strict=True)])
    found = pair_figures(own, others) | {"loop/step_median_s": 1.1}
    result = BenchResult("b", {"bench": {"other_kwargs": {"seconds": 0}}}, {}, {}, found, {}, [], [], [], 1.0)
    console = Console(record=True, width=300)
    print_result(replace(result, pairs=[1.1, 1.1]), console)
    told = console.export_text()
    assert "median step over that with seconds=0: 1.100 (1.10 s and 1.00 s, generation 0.20 s longer)" in told
    assert "90 % of 2 resampled pairs: 1.100 to 1.100" in told
    assert "each pair: 1.100, 1.100; median 1.100, mean 1.100" in told


class ArgumentsOfSteps(World):
    """Remembers the arguments of the environments of each step."""

    def __init__(self):
        super().__init__()
        self.kwargs = []

    async def sample(self, prompt, *, seeds, sampling):
        self.kwargs.append(dict(prompt.task.kwargs))
        return await super().sample(prompt, seeds=seeds, sampling=sampling)


def test_every_other_step_of_the_real_loop_has_the_other_arguments():
    bench = {"warmup_steps": 2, "steps": 2, "other_kwargs": {"seconds": 0}}
    settings = as_benchmark(
        config(bench=bench, data=EPISODES, batch={"prompts_per_step": 4, "samples_per_prompt": 2})
    )
    assert settings.steps == 2 + 2 * 2
    world, recorder = ArgumentsOfSteps(), BenchRecorder(settings.seed, Path(), lambda step, metrics: None)
    alternating = AlternatingEnvironments(
        world, {"seconds": 0}, seed=settings.seed, samples=2, warmup_steps=2
    )
    workers = replace(world.workers(), rollouts=alternating)
    given = [replace(p, task=Task(SLOW, {"seconds": 0.2, "turns": 3})) for p in prompts(32)]
    asyncio.run(driver.run(settings, workers, given, [], recorder, NoCheckpoints()))
    seconds = [[own["seconds"] for own in world.kwargs[4 * i : 4 * i + 4]] for i in range(6)]
    assert seconds == [[0.2] * 4, [0] * 4, [0.2] * 4, [0] * 4, [0] * 4, [0.2] * 4]
    assert all(own["turns"] == 3 for own in world.kwargs), "the other arguments stay"
    own, others = divide(timed(settings.bench, recorder.steps))
    assert [[step.step for step in steps] for steps in (own, others)] == [[3, 6], [4, 5]]


@pytest.mark.parametrize(("kwargs", "means"), [
    ({}, [0.2, 0.2, 0.2]),
    ({"last_seconds": 0}, [0.2, 0.2]),
    ({"last_seconds": 0.4, "turns": 2}, [0.2, 0.4]),
    ({"seconds": 0}, []),
])  # fmt: skip
def test_a_slow_tool_takes_the_same_time_in_each_run_and_may_answer_the_last_action_otherwise(
    kwargs, means, monkeypatch
):
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    monkeypatch.setattr(slow_tools.asyncio, "sleep", sleep)
    for _ in range(2):
        tool = slow_tools.SlowTool(**kwargs)
        found = [asyncio.run(tool.step(f"action {i}")) for i in range(kwargs.get("turns", 3))]
        assert [step.done for step in found] == [False] * (len(found) - 1) + [True]
    count = len(waits) // 2
    assert waits[:count] == waits[count:]
    expected = [
        random.Random(f"{i} action {i}").lognormvariate(math.log(mean) - 0.5, 1.0)
        for i, mean in enumerate(means)
    ]
    assert waits[:count] == pytest.approx(expected)


@pytest.mark.parametrize(("changes", "words"), [
    ({"data": {"train": [{"path": "demo:add3"}]}}, "needs sources with an environment"),
    ({"data": EPISODES, "max_staleness": 1}, "needs `max_staleness` = 0, not 1"),
])  # fmt: skip
def test_pairs_need_an_environment_and_steps_that_do_not_overlap(changes, words):
    with pytest.raises(ValueError, match=words):
        config(bench={"other_kwargs": {"seconds": 0}}, **changes)


def test_arguments_that_the_environment_does_not_take_are_refused_before_a_run():
    settings = config(bench={"other_kwargs": {"minutes": 0}}, data=EPISODES)
    assert isinstance(settings.data.train[0], DataSourceConfig)
    with pytest.raises(ValueError, match="minutes"):
        _check_other_kwargs(settings.bench, settings.data, settings.environments)
