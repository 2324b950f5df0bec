"""An engine's part in a weight sync whose calls overlap: the driver cancelled one, or repeated it."""

import asyncio
from types import SimpleNamespace

import pytest

from actors.weight_sync import TransferGroup, WeightSync
from actors.workers.engine_settings import EngineSpec
from actors.workers.rollout import RolloutWorker
from grpo_dist.config import ModelConfig, RolloutConfig, WeightSyncConfig
from tests.support.patience import HANG_S

STEP_S = 0.1  # duration of the engine's call that others overlap


class Engine:
    """Runs one call after the other, as the engine's thread does. ``slow``: the calls that take `STEP_S`."""

    def __init__(self, policy, slow=()):
        self._policy, self._slow, self._thread = policy, slow, asyncio.Lock()
        self.paused = self.open = False
        self.weights = self.version = None

    async def _call(self, name, effect):
        async with self._thread:
            await asyncio.sleep(STEP_S if name in self._slow else 0)
            return effect()

    async def pause(self, *, drain):
        await self._call("pause", lambda: vars(self).update(paused=True))

    async def resume(self):
        await self._call("resume", lambda: vars(self).update(paused=False))

    async def start_weight_update(self):
        await self._call("start", lambda: vars(self).update(open=True))

    async def update_weights(self, info):
        sent = self._policy.weights  # the ranks do nothing else meanwhile

        def update():
            assert self.open
            self.weights = sent

        await self._call("update", update)

    async def finish_weight_update(self):
        def finish():
            assert self.open
            self.open = False

        await self._call("finish", finish)

    async def set_weight_version(self, version):
        await self._call("label", lambda: vars(self).update(version=version))
        return version

    async def init_transfer(self, info):
        await self._call("join", lambda: None)


class Actor:
    """A handle of ``worker`` as Ray's: a call continues though its caller is cancelled."""

    def __init__(self, worker):
        self._worker = worker

    def __getattr__(self, name):
        method = getattr(self._worker, name)

        def remote(*arguments, **options):
            return asyncio.shield(asyncio.ensure_future(method(*arguments, **options)))

        return SimpleNamespace(remote=remote)


class Group:
    """A transfer group without processes."""

    on_ranks, parameters, bucket_bytes = (), (), 1
    close = TransferGroup.close

    def __init__(self, policy, workers, name="rollout"):
        self.policy, self.workers, self.name = policy, tuple(workers), name

    async def reopen(self, workers, *, name, **_):
        return Group(self.policy, workers, name)

    async def send(self, receiving):
        await asyncio.gather(*receiving)
        return {"sync/bytes": 1.0}


def policy_with(weights):
    team = SimpleNamespace(named=dict)
    return SimpleNamespace(
        team=team, ranks=(), updates=0, sent_after=0, update_s=0, adapter_scale=None, weights=weights
    )


def worker_with(engine):
    spec = EngineSpec(RolloutConfig(), WeightSyncConfig(mode="keep"), ModelConfig(path="m"), "m", 256, seed=0)
    worker = RolloutWorker(spec)
    worker._engine = engine
    return worker


def test_an_update_may_be_repeated_while_the_engine_still_stops():
    """Another engine dies meanwhile: the driver repeats the sync at once."""

    async def overlapping():
        worker = worker_with(Engine(policy_with("a"), slow=("pause",)))
        assert await asyncio.gather(worker.begin_update((1, 1)), worker.begin_update((1, 1))) == [True, True]
        assert worker._engine.open and worker._engine.paused

    asyncio.run(overlapping())


def test_an_update_that_begins_while_the_one_before_ends_leaves_the_engine_paused():
    async def overlapping():
        worker = worker_with(Engine(policy_with("a"), slow=("finish",)))
        await worker.begin_update((1, 1))
        await worker.receive_weights([], 1, None)
        assert await asyncio.gather(worker.finish_update(1), worker.begin_update((1, 1))) == [1, True]
        assert worker._engine.open and worker._engine.paused

    asyncio.run(overlapping())


def test_a_repeated_update_finds_the_weights_that_have_arrived_and_other_weights_do_not():
    async def lacks():
        worker = worker_with(Engine(policy_with("a")))
        await worker.begin_update((1, 1))
        await worker.receive_weights([], 1, None)
        return [await worker.begin_update(update) for update in ((1, 1), (1, 2), (1, 2))]

    assert asyncio.run(lacks()) == [False, True, True]


def test_an_engine_does_not_take_the_weights_of_a_cancelled_sync_for_the_weights_of_the_next():
    """Ctrl-C in `sync()` of a user-written loop, then `update()` and `sync()`."""

    async def interrupted(*, wait_s):
        policy = policy_with("before any update")
        engine = Engine(policy, slow=("update",))
        actor = Actor(worker_with(engine))
        team = SimpleNamespace(named=lambda: {"rollout-0": actor}, alive=lambda: [actor], check=lambda: None)
        sync = WeightSync(Group(policy, [actor]), SimpleNamespace(team=team), HANG_S)
        await sync.push(0)
        policy.weights, policy.updates = "of update 1", 1
        cancelled = asyncio.create_task(sync.push(1))
        await asyncio.sleep(STEP_S / 2)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        await asyncio.sleep(wait_s)
        policy.weights, policy.updates = "of update 2", 2
        await sync.push(2)
        assert (engine.version, engine.weights, engine.paused) == (2, "of update 2", False)

    for wait_s in (0, 2 * STEP_S):  # the engine still receives, or has received
        asyncio.run(interrupted(wait_s=wait_s))


def test_an_engine_that_reports_another_version_is_named_while_another_is_replaced():
    """Both in a sync of all engines, and as it joins."""

    class Forgetful(Engine):
        async def set_weight_version(self, version):
            return 7

    async def push_and_catch_up():
        policy = policy_with("a")
        actor = Actor(worker_with(Forgetful(policy)))
        named = {"rollout-0": Actor(worker_with(Engine(policy))), "rollout-1": actor}
        team = SimpleNamespace(named=lambda: named, alive=lambda: [actor], check=lambda: None)
        sync = WeightSync(Group(policy, [actor]), SimpleNamespace(team=team), HANG_S)
        for verb in (lambda: sync.push(1), lambda: sync.catch_up(actor)):
            with pytest.raises(RuntimeError, match=r"version \d but report \{'rollout-1': 7\}"):
                await verb()

    asyncio.run(push_and_catch_up())


def test_an_engine_that_joins_serves_without_waiting_for_an_update_of_the_ranks():
    """They close its transfer group once they are idle."""

    class Busy:
        def __await__(self):
            raise AssertionError("the ranks are in an update")

    async def catch_up():
        policy, closed = policy_with("a"), []
        close = SimpleNamespace(remote=lambda name: (closed.append(name), Busy())[1])
        policy.ranks = [SimpleNamespace(close_transfer=close)] * 2
        engine = Engine(policy)
        actor = Actor(worker_with(engine))
        team = SimpleNamespace(named=lambda: {"rollout-0": actor})
        await WeightSync(Group(policy, [actor]), SimpleNamespace(team=team), HANG_S).catch_up(actor)
        assert (engine.version, engine.weights, engine.paused) == (0, "a", False)
        assert closed == ["rollout restarted"] * 2

    asyncio.run(catch_up())
