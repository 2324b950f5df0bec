"""Samples that fail in real actors: two engines and an environment worker, without vLLM.

Ray wraps what an actor raises. The driver distinguishes a failed sample from a failed engine.
"""

import asyncio
import logging
from itertools import chain
from types import SimpleNamespace
from uuid import uuid4

import numpy as np
import pytest

from actors.workers.engine_settings import EngineSpec
from actors.workers.environment import Act, ActingEpisode, EnvironmentCalls, EnvironmentPool
from actors.workers.rollout import RolloutPool, RolloutWorker, _generation
from grpo_dist.config import (
    DistillationConfig,
    EnvironmentsConfig,
    ModelConfig,
    RolloutConfig,
    WeightSyncConfig,
)
from grpo_dist.environments.base import Problem
from grpo_dist.environments.episode import Action, Generation
from grpo_dist.errors import SamplesFailed
from grpo_dist.loop.groups import FrozenModels, GroupDraw, GroupScorer
from grpo_dist.runtime.seeds import request_seed
from grpo_dist.types import Group, Prompt, Rollout, Sampling, Task
from tests.support.real_engine import ACTORS, OnALoop

pytestmark = [pytest.mark.machine, pytest.mark.slow]

SEED, SAMPLES = 7, 4
TASK = Task("calculator", {})


def prompt(name, task=None):
    return Prompt(name, np.array([1, 2], np.int32), "1", "made", text=name, task=task)


def seeds(uid, *samples):
    """Return the seeds of these samples of prompt ``uid``; numbers from 4 on belong to later draws."""
    return [request_seed(SEED, 0, uid, i) for i in samples]


class FailingEngine(RolloutWorker):
    """An engine without a model. Its requests and the actions of its environment worker fail for ``gone``
    seeds; ``broken`` seeds fail the whole engine.
    """

    async def start(self, environments=None):
        self._tokenizer = SimpleNamespace(decode=lambda ids, **_: "text")
        self._line = EnvironmentCalls(environments.workers[0])
        self._episodes = SimpleNamespace(sample=self._episode, workers=SimpleNamespace(use=lambda _: None))
        self._gone, self._broken, self._asked = set(), set(), []

    async def fail(self, gone, broken):
        self._gone, self._broken, self._asked = set(gone), set(broken), []

    async def asked(self):
        return self._asked

    async def _generate(self, ids, seed, *rest, **more):
        self._asked.append(seed)
        if seed in self._broken:
            raise RuntimeError("the engine died")
        if seed in self._gone:
            _generation(SimpleNamespace(outputs=[SimpleNamespace(finish_reason="repetition")]))
        return Generation([5, 2], np.zeros(2, np.float32), np.zeros(2, np.int32), "stop", 0)

    async def _episode(self, prompt, sample, seed, sampling, length):
        """Act once; if it is to fail, with the second action of an episode unknown to its worker."""
        turn = 1 if seed in self._gone else 0
        problem = Problem(prompt.text, prompt.answer, {})
        episode = ActingEpisode(f"e:{uuid4().hex}", prompt.task, problem)
        await self._line.act(Act(episode, Action("1"), turn=turn))
        return self._rollout(prompt.uid, sample, await self._generate([1, 2], 0))


class World(OnALoop):
    """Scores groups as a run does: the reward of a sample is its number."""

    def __init__(self):
        super().__init__()
        self.run(self._start())

    async def _start(self):
        model, rollout = ModelConfig(path="m"), RolloutConfig(num_workers=2)
        spec = EngineSpec(rollout, WeightSyncConfig(), model, "m", 256, 0)
        self.environments = EnvironmentPool(EnvironmentsConfig(num_workers=1), ACTORS, sandboxed=False)
        self.rollouts = RolloutPool(spec, ACTORS, environments=self.environments, worker=FailingEngine)
        await asyncio.gather(self.environments.ready(), self.rollouts.ready())
        self.teams = [self.rollouts.team, self.environments.team]

    async def score(self, prompt, rollouts):
        samples: tuple[Rollout, ...] = await rollouts
        rewards = np.array([sample.sample for sample in samples], np.float32)
        return Group(prompt, samples, rewards, {"number": rewards}, ("",) * len(samples))

    def groups(self, prompts, *, least=2, gone=(), broken=()):
        """Return the samples' numbers of each group, in order, and the seeds that engines generated with."""

        async def sample():
            workers = SimpleNamespace(rollouts=self.rollouts, rewards=self, reference=None, teachers={})
            scorer = GroupScorer(
                workers, {0: Sampling(max_new_tokens=8)}, seed=SEED, draw=GroupDraw(SAMPLES, least),
                finished={}, models=FrozenModels(workers, DistillationConfig(), with_kl=False),
            )  # fmt: skip
            await asyncio.gather(*(w.fail.remote(list(gone), list(broken)) for w in self.rollouts.workers))
            scored = await asyncio.gather(*(scorer.sample_and_grade(prompt, 0) for prompt in prompts))
            seeds_used = await asyncio.gather(*(w.asked.remote() for w in self.rollouts.workers))
            return [[r.sample for r in group.rollouts] for group in scored], sorted(chain(*seeds_used))

        return self.run(sample())

    def is_whole(self):
        """Return whether every actor serves and none was replaced."""
        return all(team.is_whole and team.restarted() == 0 for team in self.teams)

    def close(self):
        self.run(self.rollouts.shutdown())
        self.run(self.environments.shutdown())
        self.loop.close()


@pytest.fixture(scope="module")
def world(ray_cluster):
    world = World()
    yield world
    world.close()


def test_the_others_of_a_group_and_all_other_groups_continue(world):
    prompts = [prompt(name) for name in "abcd"]
    numbers, seeds_used = world.groups(prompts, gone=[*seeds("a", 1), *seeds("c", 0, 3)])
    assert numbers == [[0, 2, 3], [0, 1, 2, 3], [1, 2], [0, 1, 2, 3]]
    assert seeds_used == sorted(seed for p in prompts for seed in seeds(p.uid, 0, 1, 2, 3))  # each once
    assert world.is_whole()


def test_a_group_with_too_few_is_drawn_again_and_a_warning_of_one_line_names_it(world, caplog):
    with caplog.at_level(logging.WARNING, "grpo_dist"):
        numbers, seeds_used = world.groups([prompt("a"), prompt("b")], gone=seeds("a", 0, 1, 3))
    assert numbers == [[0, 1, 2, 3]] * 2
    assert seeds_used == sorted(seeds("a", *range(8)) + seeds("b", *range(4)))
    assert [record.getMessage() for record in caplog.records] == [
        "1 of 4 samples of a: rollout: the engine ended a request with 'repetition', expected at least "
        "2, half of `batch.samples_per_prompt`; resampling the group"
    ]
    assert world.is_whole()


def test_a_group_that_fails_three_times_ends_with_one_line_that_names_it(world):
    with pytest.raises(SamplesFailed) as caught:
        world.groups([prompt("a"), prompt("b")], gone=seeds("a", *range(12)))
    assert str(caught.value) == (
        "0 of 4 samples of a: rollout: the engine ended a request with 'repetition'; the last of 3 draws, "
        "expected at least 2, half of `batch.samples_per_prompt`. See the logs of the engines"
    )
    assert world.is_whole()


def test_an_action_that_raises_in_the_environment_worker_fails_its_own_sample(world, caplog):
    episodes = [prompt("a", TASK), prompt("b", TASK)]
    numbers, _ = world.groups(episodes, gone=seeds("a", 2))
    assert numbers == [[0, 1, 3], [0, 1, 2, 3]]
    with caplog.at_level(logging.WARNING, "grpo_dist"):
        numbers, _ = world.groups(episodes, least=4, gone=seeds("b", 1))
    assert numbers == [[0, 1, 2, 3]] * 2
    (record,) = caplog.records
    assert record.getMessage().startswith("3 of 4 samples of b: environment: UnknownEpisode: e:")
    assert world.is_whole()


def test_an_engine_that_fails_as_a_whole_is_no_failed_sample(world):
    with pytest.raises(RuntimeError, match="the engine died") as caught:
        world.groups([prompt("a")], broken=seeds("a", 1))
    assert not isinstance(caught.value, SamplesFailed)
