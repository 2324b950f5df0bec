"""Benchmarks of pairs: which steps have the other arguments, how pairs are divided, and what is refused."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_dist import driver
from grpo_dist.config import DataSourceConfig
from grpo_dist.tools.bench.alternate import AlternatingEnvironments, divide, is_other, pair_figures
from grpo_dist.tools.bench.record import BenchRecorder, NoCheckpoints, StepRecord
from grpo_dist.tools.bench.run import _check_other_kwargs, as_benchmark, timed
from grpo_dist.tools.bench.table import FIGURES
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
    assert set(found) <= set(FIGURES)


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
