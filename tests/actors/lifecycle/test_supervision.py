"""Actors that die or hang, as real processes without engines: which calls are repeated, and when retries
end.
"""

import asyncio
import logging
import os
import signal

import numpy as np
import psutil
import pytest
import ray
from ray.exceptions import RayActorError

import actors.workers.reference
from actors.lifecycle.calls import kill, one_at_a_time, result
from actors.lifecycle.team import ActorSpec, Team, WorkerLost
from actors.workers.reference import ReferencePool
from actors.workers.reward import RewardPool
from actors.workers.rollout import RolloutPool
from grpo_dist.config import (
    ModelConfig,
    ReferenceConfig,
    RestartsConfig,
    RewardsConfig,
    RolloutConfig,
    SpeculationConfig,
)
from grpo_dist.runtime.hardware import thread_environment
from grpo_dist.types import Prompt, Sampling
from tests.support.crashing_actors import Busy, Engine, Frozen, Grader
from tests.support.made_records import made_rollouts
from tests.support.patience import HANG_S
from tests.support.simulated_actors import SimulatedSpec

pytestmark = pytest.mark.machine

OPTIONS = {"num_cpus": 0, "runtime_env": {"env_vars": thread_environment(1)}}
QUICK = RestartsConfig(backoff_s=0.05, hang_s=HANG_S)  # nothing hangs
HANGS = QUICK.model_copy(update={"hang_s": 10.0})  # slow actors answer within it


def prompt(uid):
    return Prompt(uid, np.array([1, 2], np.int32), "1", "made", "1")


def pool(workers, restarts=QUICK, **rollout):
    spec = SimulatedSpec(RolloutConfig(num_workers=workers, **rollout), samples_per_prompt=2, max_num_seqs=2)
    return RolloutPool(spec, ActorSpec(OPTIONS, restarts=restarts, start_s=HANG_S), worker=Engine)


async def fetched(rollouts, uid):
    """Return the prompt, the seeds and the process of a group."""
    group = await (await rollouts.sample(prompt(uid), seeds=[1, 2], sampling=Sampling(max_new_tokens=4)))
    ((uid, text),) = {(rollout.prompt_uid, rollout.text) for rollout in group}
    return uid, tuple(rollout.sample for rollout in group), int(text)


async def with_one_lost(rollouts, lose):
    """Sample groups while ``lose(worker, process id)`` takes engine 0; return its process and the results."""
    worker = rollouts.workers[0]
    process = await worker.process.remote()
    tasks = [asyncio.create_task(fetched(rollouts, f"p{i}")) for i in range(30)]
    await asyncio.sleep(0.07)
    await lose(worker, process)
    async with asyncio.timeout(HANG_S):
        return process, await asyncio.gather(*tasks)


async def sigkill(worker, process):
    os.kill(process, signal.SIGKILL)


async def sigstop(worker, process):
    os.kill(process, signal.SIGSTOP)


async def stick(worker, process):
    await worker.stick.remote()


async def fail(worker, process):
    await worker.fail.remote()


def test_requests_of_a_lost_engine_are_sampled_exactly_once(ray_cluster, caplog):
    """Engines are killed, stopped, stuck in a step, and failed in a step, one after the other."""

    async def session():
        rollouts = pool(2, HANGS.model_copy(update={"max_per_worker": 4}))
        await rollouts.ready()
        for lose in (sigkill, sigstop, stick, fail):
            process, groups = await with_one_lost(rollouts, lose)
            assert [(uid, seeds) for uid, seeds, _ in groups] == [(f"p{i}", (1, 2)) for i in range(30)]
            async with asyncio.timeout(HANG_S):
                while len(rollouts.team.alive()) < 2 or _lives(process):
                    await asyncio.sleep(0.05)
            assert all(load.sequences == load.tokens == 0 for load in rollouts.team.load_balancer._loads)
            assert rollouts.team.restarted() == 1.0 and rollouts.team.restarted() == 0.0
            assert await rollouts.workers[0].process.remote() != process
        await rollouts.shutdown()

    with caplog.at_level(logging.WARNING, "grpo_dist"):
        asyncio.run(session())
    messages = [record.getMessage() for record in caplog.records if record.name == "grpo_dist"]
    assert [line for line in messages if line == "rollout-0 serves again"] == messages[1::2]
    reasons = (
        "died", "answers its health check", "has made no progress", "the engine has failed: out of memory",
    )  # fmt: skip
    for line, reason in zip(messages[::2], reasons, strict=True):
        assert line.startswith("rollout-0 is lost (") and reason in line
    assert "restart 4 of 4 in 0.4 s" in messages[6]


@pytest.mark.parametrize("tokens", [pytest.param(0, marks=pytest.mark.slow), 4])
def test_with_speculation_an_engine_gets_the_prompts_of_which_it_remembers_samples(ray_cluster, tokens):
    """At equal load: of two idle engines. A replaced engine remembers nothing."""

    async def session():
        rollouts = pool(2, speculation=SpeculationConfig(tokens=tokens) if tokens else None)
        await rollouts.ready()
        first = dict(
            zip("ab", await asyncio.gather(fetched(rollouts, "a"), fetched(rollouts, "b")), strict=True)
        )
        assert first["a"][2] != first["b"][2]
        for uid in "bba":
            group = await fetched(rollouts, uid)
            # Without speculation, an idle pool begins with its first engine.
            assert group[2] == (first[uid][2] if tokens else first["a"][2])
        if tokens:
            assert rollouts._samples_of == {"a": 0, "b": 1}
            rollouts._forget(1)
            assert rollouts._samples_of == {"a": 0}
        await rollouts.shutdown()

    asyncio.run(session())


def _lives(process):
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_restarted_engine_samples_nothing_before_it_has_caught_up(ray_cluster):
    async def session():
        rollouts, caught_up = pool(1), []

        async def catch_up(worker):
            await asyncio.sleep(0.3)
            caught_up.append(await worker.process.remote())

        rollouts.team.catch_up = catch_up
        await rollouts.ready()
        process, groups = await with_one_lost(rollouts, sigkill)
        await rollouts.shutdown()
        assert len(caught_up) == 1 and {pid for *_, pid in groups} <= {process, caught_up[0]}
        return rollouts

    asyncio.run(session())


@pytest.mark.slow
def test_a_caller_that_waited_for_an_engine_to_catch_up_finds_it_serving(ray_cluster):
    """A push that waits for the same lock must not consider the engine still away."""

    async def session():
        rollouts, lock, serving = pool(1), asyncio.Lock(), []

        async def catch_up(worker):
            async with lock:
                waiting.append(asyncio.create_task(push()))
                await worker.process.remote()

        async def push():
            async with lock:
                serving.append(len(rollouts.team.alive()))

        waiting = []
        rollouts.team.catch_up = catch_up
        await rollouts.ready()
        await with_one_lost(rollouts, sigkill)
        await asyncio.gather(*waiting)
        await rollouts.shutdown()
        return serving

    assert asyncio.run(session()) == [1]


@pytest.mark.slow
def test_an_engine_that_hangs_while_it_catches_up_is_replaced_again(ray_cluster):
    async def session():
        rollouts, stopped_at = pool(1, HANGS), []

        async def catch_up(worker):
            if not stopped_at:
                stopped_at.append(await worker.process.remote())
                os.kill(stopped_at[0], signal.SIGSTOP)
            await worker.process.remote()

        rollouts.team.catch_up = catch_up
        await rollouts.ready()
        _, groups = await with_one_lost(rollouts, sigkill)
        assert len(groups) == 30 and not {pid for *_, pid in groups} & {*stopped_at}
        assert rollouts.team.restarted() == 2.0
        await rollouts.shutdown()

    asyncio.run(session())


@pytest.mark.slow
def test_without_restarts_left_every_waiting_caller_learns_which_engine_failed(ray_cluster):
    async def session(restarts, losses):
        rollouts, lost = pool(1, restarts), None
        # A replacement is stuck before it serves, so no engine ever answers a caller.
        rollouts.team.catch_up = lambda worker: result(worker.stick.remote())
        await rollouts.ready()
        await rollouts.workers[0].stick.remote()
        tasks = [asyncio.create_task(fetched(rollouts, f"p{i}")) for i in range(5)]
        await asyncio.sleep(0.1)
        for _ in range(losses):
            async with asyncio.timeout(HANG_S):
                while rollouts.workers[0] is lost or not rollouts.team.is_current(0, rollouts.workers[0]):
                    await asyncio.sleep(0.02)
            lost = rollouts.workers[0]
            kill([lost])
        async with asyncio.timeout(HANG_S):
            errors = await asyncio.gather(*tasks, return_exceptions=True)
        with pytest.raises(WorkerLost):
            rollouts.team.check()
        await rollouts.shutdown()
        return errors

    for error in asyncio.run(session(None, 1)):
        assert isinstance(error, WorkerLost) and str(error).startswith("rollout-0 is lost (")
    for error in asyncio.run(session(QUICK.model_copy(update={"max_per_worker": 1}), 2)):
        assert isinstance(error, WorkerLost)
        assert "after 1 restart(s) within an hour, all of `cluster.restarts.max_per_worker`" in str(error)


@pytest.mark.slow
def test_long_work_is_not_a_hang(ray_cluster):
    async def session():
        actor = one_at_a_time(Busy)
        team = Team(
            "busy",
            [lambda name: actor.options(num_cpus=0).remote()],
            ActorSpec(restarts=RestartsConfig(hang_s=10), start_s=HANG_S),
        )
        await team.ready()
        first = await asyncio.gather(*(team.call("work", 3.5) for _ in range(3)))
        assert len(set(first)) == 1 and team.restarted() == 0
        os.kill(first[0], signal.SIGKILL)
        assert await team.call("work", 0.0) != first[0]  # before anyone noticed the loss
        await team.shutdown()
        kill(team.workers)

    asyncio.run(session())


def test_a_group_that_kills_two_reward_workers_is_left_unscored_and_the_next_is_scored(
    ray_cluster, tmp_path, caplog
):
    settings = RewardsConfig.model_validate({"processes_per_worker": 1, "functions": [{"function": "math"}]})
    samples = made_rollouts("p", 2, np.random.default_rng(0))
    once = Prompt("once", np.array([1], np.int32), "1", "made", "1", {"mark": str(tmp_path / "died")})

    async def session():
        rewards = RewardPool(
            settings, ActorSpec(OPTIONS, restarts=QUICK, start_s=HANG_S), max_new_tokens=64, worker=Grader
        )
        await rewards.ready()
        async with asyncio.timeout(HANG_S):
            prompts = (once, prompt("poison"), prompt("ok"))
            groups = [await rewards.score(p, samples) for p in prompts]
        await rewards.shutdown()
        return groups, rewards.team.restarted()

    groups, restarted = asyncio.run(session())
    assert restarted == 3 and (tmp_path / "died").exists()
    for group in (groups[0], groups[2]):
        assert not np.isnan(group.rewards).any()
    poisoned = groups[1]
    assert np.isnan(poisoned.rewards).all() and poisoned.outcomes == ("error", "error")
    assert poisoned.reward_parts.keys() == groups[2].reward_parts.keys() and len(poisoned.rollouts) == 2
    assert any("2 workers were lost over prompt poison" in r.getMessage() for r in caplog.records)


@pytest.mark.slow
@pytest.mark.parametrize("refresh_every", [0, 5])
def test_a_reference_is_restarted_unless_it_follows_the_policy(ray_cluster, monkeypatch, refresh_every):
    monkeypatch.setattr(actors.workers.reference, "ReferenceWorker", Frozen)

    async def session():
        reference = ReferencePool(
            ReferenceConfig(refresh_every=refresh_every), ActorSpec(OPTIONS, restarts=QUICK, start_s=HANG_S),
            model=ModelConfig(path="tiny"), model_dir="", temperature=1.0,
        )  # fmt: skip
        await reference.ready()
        before = await reference.logprobs(prompt("p"), ["abc", "d"])
        ray.kill(reference.workers[0])
        with pytest.raises(RayActorError):  # a killed actor may answer a last time
            while True:
                await reference.workers[0].ready.remote()
        try:
            return before, await reference.logprobs(prompt("p"), ["abc", "d"])
        finally:
            await reference.shutdown()

    if refresh_every:
        with pytest.raises(WorkerLost, match=r"reference-0 is lost .*can only be restored from a checkpoint"):
            asyncio.run(session())
    else:
        before, after = asyncio.run(session())
        assert before == after == [3, 1]


def test_a_hang_deadline_below_the_interval_of_health_checks_is_refused():
    with pytest.raises(ValueError, match="greater than 3"):
        RestartsConfig(hang_s=2)
