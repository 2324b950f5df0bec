"""How callers handle the errors that Ray raises for lost actors; no Ray is started."""

import asyncio
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import (
    ActorDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    OwnerDiedError,
    RayTaskError,
    WorkerCrashedError,
)

from actors.cluster import Cluster
from actors.lifecycle import team
from actors.lifecycle.calls import Health
from actors.lifecycle.team import ActorSpec, Team
from actors.workers.exchange import StoredGroups, StoredSamples
from actors.workers.reward import RewardPool
from actors.workers.rollout import StoredRoutes
from grpo_dist.config import RestartsConfig, RewardsConfig
from grpo_dist.driver import run
from grpo_dist.errors import SamplesLost, StateLost, TransferLost, WorkerLost
from grpo_dist.loop.progress import PipelineState, Progress, SampledBatch
from grpo_dist.runs.checkpoint import Checkpoints
from tests.support import fakes
from tests.support.made_checkpoints import Disk
from tests.support.made_groups import group_of

OBJECT_LOST = ObjectLostError("00" * 28, b"", "")


def in_an_actor(error):
    """Wrap an error as Ray does when an actor raises it."""
    return RayTaskError("score", f"a traceback: {error}", error).as_instanceof_cause()


class Method:
    def __init__(self, function):
        self._function = function

    def options(self, **_):
        return self

    def remote(self, *arguments):
        return self._function(*arguments)


class Worker:
    """Raises ``errors`` one after the other, then answers."""

    def __init__(self, errors):
        async def ready():
            """Up."""

        async def health():
            return Health()

        async def score(what):
            if errors:
                raise errors.pop(0)
            return what

        self.ready, self.health, self.score = Method(ready), Method(health), Method(score)


@pytest.fixture(autouse=True)
def nobody_is_killed(monkeypatch):
    monkeypatch.setattr(team, "kill", lambda workers: None)


async def call_score(*errors):
    """Return the answer, and how many restarts it took."""
    rest = list(errors)
    team = Team(
        "reward", [lambda name: Worker(rest)], ActorSpec(restarts=RestartsConfig(backoff_s=0.01), start_s=5)
    )
    await team.ready()
    try:
        return await team.call("score", 42), team.restarted()
    finally:
        await team.shutdown()


@pytest.mark.parametrize(
    "error",
    [ActorDiedError(), OutOfMemoryError("its node's memory"), NodeDiedError("gone"), WorkerCrashedError()],
)
def test_an_actor_is_replaced_whichever_error_ray_raises_for_its_loss(error):
    assert asyncio.run(call_score(error)) == (42, 1)


class OnANode:
    """Two workers of a node that is lost. Ray reports each when ``reports`` has its event."""

    def __init__(self, name, reports):
        self._lost = reports.get(name)  # None: a replacement, elsewhere
        self.ready, self.health, self.score = (
            Method(one) for one in (self._ready, self._health, self._score)
        )

    async def _ready(self):
        """Up."""

    async def _health(self):
        return await self._answer(Health())

    async def _score(self, uid):
        return await self._answer(uid)

    async def _answer(self, answer):
        if self._lost is not None:
            await self._lost.wait()  # the node does not answer, and Ray does not know yet
            raise ActorDiedError()
        return answer


def test_groups_of_a_lost_node_are_scored_though_it_had_two_of_their_workers():
    async def score(group, worker):
        return await worker.score.remote(group)

    async def scored():
        reports = {"reward-0": asyncio.Event(), "reward-1": asyncio.Event()}
        spec = ActorSpec(restarts=RestartsConfig(backoff_s=0.05), start_s=5)
        team = Team("reward", [lambda name: OnANode(name, reports)] * 2, spec)
        await team.ready()
        try:
            calls = [asyncio.create_task(team.send(partial(score, i), attempts=2)) for i in range(8)]
            for report in reports.values():
                await asyncio.sleep(0.01)
                report.set()
            return await asyncio.gather(*calls), team.restarted()
        finally:
            await team.shutdown()

    assert asyncio.run(scored()) == (list(range(8)), 2)


async def lost_reference():
    """A reference to samples whose node is lost."""
    raise OBJECT_LOST


def test_a_group_whose_workers_and_samples_are_lost_is_sampled_again():
    async def send(_, *, attempts):
        raise ActorDiedError()

    async def scored():
        return await pool.score(group_of([1.0], [2]).prompt, StoredSamples(StoredGroups(lost_reference()), 0))

    pool = object.__new__(RewardPool)
    pool.models, pool.team, pool._settings = [], SimpleNamespace(send=send), RewardsConfig()
    with pytest.raises(SamplesLost):
        asyncio.run(scored())


@pytest.mark.parametrize("error", [OBJECT_LOST, in_an_actor(OBJECT_LOST)])
def test_lost_samples_do_not_count_as_a_failure_of_the_actor_that_reads_them(error):
    with pytest.raises(SamplesLost, match="reward-0"):
        asyncio.run(call_score(error))


def test_an_error_raised_by_an_actor_is_raised_unchanged():
    with pytest.raises(ValueError, match="no such answer"):
        asyncio.run(call_score(in_an_actor(ValueError("no such answer"))))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ActorDiedError(), StateLost), (OutOfMemoryError("x"), StateLost), (OBJECT_LOST, StateLost),
        (in_an_actor(OBJECT_LOST), StateLost), (in_an_actor(TransferLost("gloo")), StateLost),
        (SamplesLost("x"), StateLost), (TimeoutError("stage x"), StateLost),
        (in_an_actor(ValueError("x")), ValueError), (WorkerLost("no restart is left"), WorkerLost),
    ],
)  # fmt: skip
def test_an_unrecoverable_failure_goes_back_to_the_checkpoint(error, expected):
    async def fail():
        async with Cluster(fakes.config()).failures_as_state_lost():
            raise error

    with pytest.raises(expected):
        asyncio.run(fail())


def test_a_save_that_is_the_first_reader_of_lost_routes_goes_back_to_the_checkpoint(tmp_path, monkeypatch):
    """With `policy.router_replay`, if the engine that owned them dies before the ranks fetch them."""

    def owner_is_dead(reference, *, timeout):
        raise OwnerDiedError("00" * 28, b"", "")

    monkeypatch.setattr(ray, "get", owner_is_dead)
    group = group_of([1.0, 0.0], [2, 3])
    group = replace(group, rollouts=tuple(replace(r, routes=StoredRoutes(None, {})) for r in group.rollouts))
    progress = Progress(1, PipelineState(ahead={1: SampledBatch([group])}))
    config = fakes.config(checkpoint={"background": False})

    async def saved():
        async with Cluster(config).failures_as_state_lost():
            await Checkpoints(tmp_path, config, fakes.prompts(2)).save(1, Disk(), progress)

    with pytest.raises(StateLost, match="the routes of a sample are lost"):
        asyncio.run(saved())


class LosesSamples(fakes.World):
    """Loses the samples of every third group once, before they are read."""

    def __init__(self, who):
        super().__init__()
        self._who, self._lost, self._calls = who, set(), 0

    def _read(self, who, prompt):
        self._calls += who == self._who
        if who == self._who and self._calls % 3 == 0 and prompt.uid not in self._lost:
            self._lost.add(prompt.uid)
            raise SamplesLost(prompt.uid)

    async def score(self, prompt, rollouts):
        self._read("score", prompt)
        return await super().score(prompt, rollouts)

    async def logprobs(self, prompt, rollouts, top_k=0):
        self._read("logprobs", prompt)
        return await super().logprobs(prompt, rollouts, top_k)

    @property
    def lost(self):
        return len(self._lost)


DYNAMIC = {"dynamic_sampling": {"enabled": True}}  # its reference receives the samples themselves


@pytest.mark.parametrize(
    ("who", "changes"), [("score", {}), ("logprobs", {}), (None, {}), ("score", DYNAMIC), (None, DYNAMIC)]
)
def test_lost_samples_are_drawn_again_identically(who, changes, caplog):
    def trained(world):
        config = fakes.config(algorithm={"kl": {"coef": 0.1}}, **changes)
        workers = world.workers(reference=True)
        asyncio.run(run(config, workers, fakes.prompts(24), [], world, world))
        return [[batch.tokens.tolist() for batch in step] for step in world.updates]

    world = LosesSamples(who)
    assert trained(world) == trained(fakes.World())
    warnings = sum("samples are lost and sampled again" in line for line in caplog.messages)
    assert warnings == world.lost and (warnings > 0) == (who is not None)


def test_an_actor_on_a_gpu_has_a_minute_before_it_counts_as_hung():
    """Compiling a kernel or capturing a graph blocks health checks for tens of seconds."""
    default, configured = RestartsConfig(), RestartsConfig(hang_s=25)
    assert ActorSpec(restarts=default, on_gpu=True).hang_s == 60
    assert ActorSpec(restarts=default, on_gpu=False).hang_s == 13
    assert [ActorSpec(restarts=configured, on_gpu=gpu).hang_s for gpu in (True, False)] == [25, 25]
    assert ActorSpec(start_s=600, on_gpu=True).hang_s == 600  # not watched
