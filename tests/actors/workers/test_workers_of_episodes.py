"""Which environment worker an episode gets, and what it does after a loss. Workers are names or fakes here;
the engine is a fake.
"""

import asyncio
import gc
from types import SimpleNamespace

import numpy as np
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from actors.workers import environment, episodes
from actors.workers.environment import EnvironmentAddresses
from actors.workers.episodes import EpisodeSampler, WorkersOfEpisodes
from grpo_dist.config import DataConfig, EnvironmentsConfig
from grpo_dist.demo.tokenizer import character_tokenizer
from grpo_dist.environments.dialogue import Renderer
from grpo_dist.environments.episode import Action, Generation, Observed
from grpo_dist.tools.plan.virtual_clock import run_virtually
from grpo_dist.types import Prompt, Sampling, Task
from tests.support.patience import HANG_S


def pool_of(*workers, number=1):
    pool = WorkersOfEpisodes()
    pool.use(EnvironmentAddresses(number, workers))
    return pool


def take(pool, count):
    async def several():
        return [await asyncio.wait_for(pool.take(), HANG_S) for _ in range(count)]

    return asyncio.run(several())


async def take_after(pool, addresses):
    """Ask for a worker, which must wait; return the one taken once ``addresses`` are in use."""
    waiting = asyncio.create_task(pool.take())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    pool.use(addresses)
    return await asyncio.wait_for(waiting, HANG_S)


def test_each_episode_gets_the_worker_with_the_fewest():
    pool = pool_of("a", "b", "c")
    assert sorted(take(pool, 6)) == ["a", "a", "b", "b", "c", "c"]
    pool.give_back("b")
    assert take(pool, 1) == ["b"]


def test_older_addresses_that_arrive_late_change_nothing():
    pool = pool_of("new", number=3)
    pool.use(EnvironmentAddresses(2, ("old",)))
    assert take(pool, 2) == ["new", "new"]


def test_a_worker_that_did_not_answer_gets_no_episode_until_its_replacement_is_there():
    pool = pool_of("a", "b")
    pool.suspect("a")
    assert take(pool, 3) == ["b"] * 3
    pool.use(EnvironmentAddresses(2, ("c", "b")))
    assert take(pool, 3) == ["c"] * 3


def test_a_dead_worker_is_never_tried_again(monkeypatch):
    """Even if the driver has not noticed, and new addresses still name it."""
    monkeypatch.setattr(episodes, "_RETRY_S", 0.001)

    async def session():
        pool = pool_of("a")
        pool.suspect("a", dead=True)
        pool.use(EnvironmentAddresses(2, ("a",)))
        return await take_after(pool, EnvironmentAddresses(3, ("b",)))

    assert asyncio.run(session()) == "b"


def test_an_episode_waits_for_the_replacement_of_the_last_worker(monkeypatch):
    monkeypatch.setattr(episodes, "_RETRY_S", HANG_S)

    async def session():
        pool = pool_of("a")
        pool.suspect("a")
        return await take_after(pool, EnvironmentAddresses(2, ("b",)))

    assert asyncio.run(session()) == "b"


def test_a_worker_that_the_driver_does_not_replace_is_tried_again(monkeypatch):
    """The network failed, and not the worker: no new addresses will come."""
    monkeypatch.setattr(episodes, "_RETRY_S", 0.01)
    pool = pool_of("a")
    pool.suspect("a")
    assert take(pool, 1) == ["a"]


def test_waiting_episodes_get_the_error_that_ended_the_role(monkeypatch):
    monkeypatch.setattr(episodes, "_RETRY_S", HANG_S)

    async def session():
        pool = pool_of()
        waiting = asyncio.create_task(pool.take())
        await asyncio.sleep(0)
        pool.use(EnvironmentAddresses(2, (), "environment-0 is lost after 3 restart(s)"))
        await asyncio.wait_for(waiting, HANG_S)

    with pytest.raises(RuntimeError, match="environments: environment-0 is lost after 3 restart"):
        asyncio.run(session())


class FakeWorker:
    """Raises the next of ``errors`` for each action; then answers."""

    def __init__(self, *errors):
        self.errors, self.acts, self.ends = list(errors), 0, 0
        self.act, self.end = SimpleNamespace(remote=self._act), SimpleNamespace(remote=self._end)
        self.prepare = SimpleNamespace(remote=lambda episodes: None)

    async def _act(self, acts):
        self.acts += 1
        if self.errors:
            raise self.errors.pop(0)
        return [Observed(done=True)] * len(acts)

    def _end(self, episodes):
        self.ends += len(episodes)


class FakeRows:
    """Replaces `Dialogue`; its rollout is the finish reason and the observed failures."""

    def __init__(self, renderer, prompt):
        self.observed = []

    def observe(self, observed):
        self.observed.append(observed)

    def rollout(self, sample, finish_reason):
        return finish_reason, [observed.failed for observed in self.observed]


@pytest.fixture
def sampler(monkeypatch):
    async def play(rows, ends, budgets, *, seed):
        rows.observe(await ends.act(Action("a"), 0))
        return "stop"

    engine = SimpleNamespace(get_actor_id=lambda: "engine")
    monkeypatch.setattr(episodes, "ray", SimpleNamespace(get_runtime_context=lambda: engine))
    monkeypatch.setattr(episodes, "_RETRY_S", 0.001)
    monkeypatch.setattr(episodes, "Dialogue", FakeRows)
    monkeypatch.setattr(episodes, "play", play)
    meter = SimpleNamespace(count=lambda name, value: None)
    return EpisodeSampler(None, None, EnvironmentsConfig(), meter, 512)


def test_stop_texts_of_an_action(sampler, monkeypatch):
    stops = []

    async def generate(token_ids, seed, sampling, max_tokens, *, exact, stop):
        stops.append(tuple(stop))
        return Generation([1], np.zeros(1, np.float32), np.zeros(1, np.int32), "stop")

    async def play(rows, ends, budgets, *, seed):
        await ends.generate([1], seed, 8)
        return "stop"

    monkeypatch.setattr(episodes, "play", play)
    data = DataConfig(train=[{"path": "demo:add3"}], chat_template="none")
    sampler._generate = generate
    sampler._renderer = Renderer(character_tokenizer(), data, EnvironmentsConfig())

    async def session():
        sampler.workers.use(EnvironmentAddresses(1, (FakeWorker(),)))
        for task in (Task("toy"), Task("toy", tools=({"type": "function"},)), Task("toy", stop=("</s>",))):
            prompt = Prompt("u", None, "1", "test", text="p", task=task)
            for length in (None, 3):  # exact lengths are a benchmark's
                await sampler.sample(prompt, 0, 1, Sampling(), length)
        await sampler.sample(prompt, 0, 1, Sampling(stop=("\n",)), None)

    asyncio.run(asyncio.wait_for(session(), HANG_S))
    code = "\n```\n"  # if the task has only tools
    assert stops == [(), (), (code,), (), ("</s>",), (), ("</s>", "\n")]


async def sampled(sampler):
    prompt = Prompt("u", None, "1", "test", text="p", task=Task("toy"))
    return await asyncio.wait_for(sampler.sample(prompt, 0, 1, Sampling(), None), HANG_S)


def test_an_episode_of_the_only_worker_waits_for_its_replacement_however_long_that_takes(sampler):
    dead = FakeWorker(*[ActorDiedError()] * 1000)

    async def session():
        sampler.workers.use(EnvironmentAddresses(1, (dead,)))
        sampling = asyncio.create_task(sampled(sampler))
        await asyncio.sleep(0.1)  # many times the retry interval
        sampler.workers.use(EnvironmentAddresses(2, (FakeWorker(),)))
        return await sampling

    assert asyncio.run(session()) == ("stop", [""])
    assert dead.acts == 1


def test_the_calls_of_a_worker_that_no_longer_serves_are_forgotten(sampler):
    """Once the ends of its episodes are sent. The clock is virtual."""
    workers = [FakeWorker() for _ in range(3)]

    async def session():
        for worker in workers:  # each replaces the one before
            sampler.workers.use(EnvironmentAddresses(workers.index(worker) + 1, (worker,)))
            await sampled(sampler)
            assert worker in sampler._calls and not worker.ends
        await asyncio.sleep(2 * environment._END_S)
        gc.collect()
        return len(sampler._calls)

    assert run_virtually(session) == 0
    assert [worker.ends for worker in workers] == [1, 1, 1]


def test_a_worker_that_stays_unreachable_is_lost_once_and_serves_again(sampler):
    worker = FakeWorker(*[ActorUnavailableError("no network", None)] * 5)

    async def session():
        sampler.workers.use(EnvironmentAddresses(1, (worker,)))
        return await sampled(sampler)

    assert asyncio.run(session()) == ("stop", [""])
    assert worker.acts == 6


def test_an_episode_that_three_different_workers_are_lost_with_has_failed(sampler):
    workers = tuple(FakeWorker(ActorDiedError()) for _ in range(4))

    async def session():
        sampler.workers.use(EnvironmentAddresses(1, workers))
        return await sampled(sampler)

    reason, (failed,) = asyncio.run(session())
    assert reason == "error" and failed.startswith("3 environment workers were lost with this episode (")
    assert [worker.acts for worker in workers] == [1, 1, 1, 0]


def test_so_has_an_agent(sampler):
    """Its sample has no tokens: no worker lived until its first answer."""
    prompt = Prompt("u", None, "1", "test", text="p", task=Task("program:x"))

    async def session():
        sampler.workers.use(EnvironmentAddresses(1, tuple(FakeWorker(ActorDiedError()) for _ in range(3))))
        return await asyncio.wait_for(sampler.sample(prompt, 2, 1, Sampling(), None), HANG_S)

    rollout = asyncio.run(session())
    assert (rollout.sample, rollout.finish_reason, rollout.num_tokens) == (2, "error", 0)
    assert "3 environment workers were lost with this episode (" in rollout.turns[0].observation
