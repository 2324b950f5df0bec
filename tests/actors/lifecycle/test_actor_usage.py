"""Usage is read while work of later batches is queued."""

import asyncio
import threading

import numpy as np
import pytest
import ray
from ray.exceptions import ActorDiedError

from actors.cluster import QUEUEING
from actors.lifecycle.calls import one_at_a_time
from actors.lifecycle.team import ActorSpec, ActorUsage
from actors.workers.exchange import ScoringActor
from actors.workers.reward import RewardPool
from grpo_dist.config import RewardsConfig
from grpo_dist.runtime.metering import Metered, Usage, metered
from tests.support.made_records import made_group, made_prompts, made_rollouts
from tests.support.patience import HANG_S

pytestmark = pytest.mark.machine

RNG = np.random.default_rng(0)


class Slow(Metered):
    def __init__(self):
        super().__init__()
        self._go, self._order = threading.Event(), []

    @metered("work")
    def work(self, number):
        assert self._go.wait(HANG_S)
        self._order.append(number)
        return list(self._order)

    def go(self):
        self._go.set()


class Whole:
    """A team whose actors all serve."""

    def __init__(self, *actors):
        self.workers = actors

    def states(self):
        return [True] * len(self.workers)

    def restarted(self):
        return 0.0


def test_an_actor_with_queued_work_reports_usage_at_once(ray_cluster):
    actor = one_at_a_time(Slow).options(num_cpus=0).remote()
    queued = [actor.work.remote(number) for number in range(4)]
    usage = ActorUsage({"reference": [Whole(actor)]}, queueing={"reference"}, timeout_s=HANG_S)
    assert "memory/reference_gib" in asyncio.run(usage.read())
    assert not ray.wait(queued, num_returns=1, timeout=0)[0]  # nothing is finished, yet it answered
    ray.get(actor.go.options(concurrency_group="parallel").remote())
    assert ray.get(queued)[-1] == [0, 1, 2, 3]  # one at a time, in order
    assert asyncio.run(usage.read())["time/reference_work_busy_s"] > 0
    ray.kill(actor)


class SlowScorer(ScoringActor, Slow):
    """A reward worker whose groups wait for a slow judge."""

    def __init__(self, settings, **options):
        super().__init__(threads=2)

    def score(self, prompt, rollouts, modelled):
        self.work(0)
        return made_group(prompt, rollouts), ()

    def close(self):
        """Release nothing."""


@pytest.mark.slow
def test_a_reward_worker_with_more_groups_than_threads_reports_usage_at_once(ray_cluster):
    """The driver waited after each step until the groups of later batches were scored."""
    settings, actors = RewardsConfig(num_workers=1, processes_per_worker=1), ActorSpec({"num_cpus": 0})
    pool = RewardPool(settings, actors, max_new_tokens=8, worker=SlowScorer)
    (actor,) = pool.workers
    usage = ActorUsage({"reward": [Whole(actor)]}, queueing=QUEUEING, timeout_s=HANG_S)

    async def session():
        prompts = made_prompts(6)
        queued = [asyncio.create_task(pool.score(p, made_rollouts(p.uid, 2, RNG))) for p in prompts]
        await asyncio.sleep(0)  # two run at once
        assert "memory/reward_gib" in await usage.read()
        assert not any(group.done() for group in queued)
        await actor.go.remote()
        assert [group.prompt for group in await asyncio.gather(*queued)] == prompts
        await pool.shutdown()

    asyncio.run(session())


class Method:
    """A fake method of an actor that answers or is dead."""

    def __init__(self, answer):
        self._answer = answer

    async def remote(self):
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


class Restarted:
    """A team whose actors all answer, though one is being replaced: the first, unless ``states`` are given.
    An absent one is None.
    """

    def __init__(self, *answers, states=None):
        self.workers = [a and type("Actor", (), {"usage": Method(a)})() for a in answers]
        self._states = states or [False, *[True] * (len(answers) - 1)]
        self._restarts = [2.0, 0.0]

    def states(self):
        return self._states

    def restarted(self):
        return self._restarts.pop(0)


def test_restarts_are_counted_and_a_lost_actor_delays_no_reading():
    team = Restarted(Usage({"sample": 8.0}), Usage({"sample": 2.0}), ActorDiedError())
    usage = ActorUsage({"rollout": [team], "reference": []}, queueing=(), timeout_s=HANG_S)
    metrics = asyncio.run(usage.read())
    assert metrics["restarts/rollout"] == 2.0 and metrics["time/rollout_sample_busy_s"] == 2.0
    assert list(usage.latest) == ["rollout-1"] and "restarts/reference" not in metrics
    assert asyncio.run(usage.read())["restarts/rollout"] == 0.0


def test_usage_has_the_names_of_the_actors_while_others_are_replaced_or_absent():
    """As the live view and the timeline name them, over all teams of a role."""
    used = [Usage({"score": float(i)}) for i in range(5)]
    teams = [
        Restarted(used[0], used[1], None, states=[True, False, None]),
        Restarted(used[3], used[4], states=[False, True]),
    ]
    usage = ActorUsage({"reward_model": teams}, queueing=(), timeout_s=HANG_S)
    asyncio.run(usage.read())
    assert usage.latest == {"reward_model-0": used[0], "reward_model-4": used[4]}
    assert [name for name, serves in usage.states().items() if serves] == list(usage.latest)
