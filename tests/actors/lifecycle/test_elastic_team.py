"""Engines that join and leave while others serve, as real processes without models."""

import asyncio
import logging
import os
import signal

import pytest
import ray

from actors.lifecycle.team import ActorSpec, GuestSpec
from actors.placement.elasticity import Elasticity
from actors.workers.rollout import RolloutPool
from grpo_dist.config import RestartsConfig, RolloutConfig
from grpo_dist.errors import StateLost
from tests.actors.lifecycle.test_supervision import OPTIONS, fetched
from tests.support.crashing_actors import Engine
from tests.support.patience import HANG_S
from tests.support.simulated_actors import SimulatedSpec

pytestmark = pytest.mark.machine

QUICK = RestartsConfig(max_per_worker=1, backoff_s=0.05, hang_s=HANG_S)
ACTORS = ActorSpec(OPTIONS, restarts=QUICK, start_s=HANG_S, guests=GuestSpec(most=2, cpus=0, gpus=0))
GROUPS = 30


class FailsToStart(Engine):
    async def start(self):
        raise RuntimeError("no memory for the model")


def here():
    return ray.get_runtime_context().get_node_id()


async def sampled(rollouts, meanwhile=None):
    """Sample many groups while ``meanwhile`` runs; return the processes that answered."""
    tasks = [asyncio.create_task(fetched(rollouts, f"p{i}")) for i in range(GROUPS)]
    await asyncio.sleep(0.07)
    if meanwhile is not None:
        await meanwhile
    async with asyncio.timeout(HANG_S):
        groups = await asyncio.gather(*tasks)
    assert [(uid, seeds) for uid, seeds, _ in groups] == [(f"p{i}", (1, 2)) for i in range(GROUPS)]
    return {process for *_, process in groups}


def session(work):
    async def run():
        settings = RolloutConfig(num_workers=1, max_workers=3)
        spec = SimulatedSpec(settings, samples_per_prompt=2, max_num_seqs=2)
        rollouts = RolloutPool(spec, ACTORS, worker=Engine)
        await rollouts.ready()
        try:
            return await work(rollouts, rollouts.team)
        finally:
            await rollouts.shutdown()

    return asyncio.run(run())


def test_a_guest_serves_once_it_has_caught_up_and_leaves_with_its_groups_finished(ray_cluster):
    async def work(rollouts, team):
        caught_up = []

        async def catch_up(worker):
            caught_up.append(worker)

        team.catch_up = catch_up
        assert len(await sampled(rollouts)) == 1 and team.free_places() == [1, 2]
        await team.join(2, here())
        assert caught_up == [rollouts.workers[2]] and team.guests() == {2: here()}
        assert len(await sampled(rollouts, team.leave(2, "a test", within_s=HANG_S))) == 2
        assert team.guests() == {} and rollouts.workers[2] is None and team.is_whole
        assert len(await sampled(rollouts)) == 1
        metrics = team.metrics()
        assert {name: metrics[f"engines/{name}"] for name in ("serving", "joined", "left")} == {
            "serving": 1.0, "joined": 1.0, "left": 1.0,
        }  # fmt: skip
        assert metrics["engines/join_s"] > 0 and metrics["engines/leave_s"] > 0
        assert team.metrics()["engines/joined"] == 0.0 and team.restarted() == 0.0

    session(work)


@pytest.mark.slow
def test_another_engine_samples_what_a_leaving_guest_has_not_finished_in_time(ray_cluster):
    async def work(rollouts, team):
        await team.join(1, here())
        await rollouts.workers[1].stick.remote()
        assert len(await sampled(rollouts, team.leave(1, "a test", within_s=0.0))) == 1

    session(work)


@pytest.mark.slow
def test_a_guest_that_is_removed_just_after_a_group_was_admitted_loses_no_group(ray_cluster, monkeypatch):
    async def work(rollouts, team):
        await team.join(1, here())
        balancer = type(team.load_balancer)
        admit = balancer.admit

        async def removed_meanwhile(self, *load, **wishes):
            index = await admit(self, *load, **wishes)
            if index == 1 and team.guests():
                team._remove(1)
            return index

        monkeypatch.setattr(balancer, "admit", removed_meanwhile)
        assert len(await sampled(rollouts)) == 1 and not team.guests()

    session(work)


def test_a_lost_guest_costs_no_restart_and_its_groups_are_sampled_by_others(ray_cluster, caplog):
    async def work(rollouts, team):
        for _ in range(QUICK.max_per_worker + 1):
            await team.join(1, here())
            process = await rollouts.workers[1].process.remote()

            async def kill(process=process):
                os.kill(process, signal.SIGKILL)

            await sampled(rollouts, kill())
            async with asyncio.timeout(HANG_S):
                while team.guests():
                    await asyncio.sleep(0.02)
            team.check()
        assert team.restarted() == 0.0 and team.metrics()["engines/left"] == QUICK.max_per_worker + 1

    with caplog.at_level(logging.WARNING, "grpo_dist"):
        session(work)
    assert all(record.getMessage().startswith("rollout-1 is lost (") for record in caplog.records)


@pytest.mark.slow
def test_a_guest_that_cannot_start_is_reported_and_the_others_continue(ray_cluster, caplog):
    async def work(rollouts, team):
        spec = SimulatedSpec(RolloutConfig(), samples_per_prompt=2)
        team._guest = ACTORS.guest_maker(ray.remote(FailsToStart), spec)
        await team.join(1, here())
        assert team.guests() == {} and team.free_places() == [1, 2]
        await team.join(2, "1" * 56)  # no such node
        assert team.guests() == {}
        await sampled(rollouts)

    with caplog.at_level(logging.WARNING, "grpo_dist"):
        session(work)
    texts = [record.getMessage() for record in caplog.records]
    assert "rollout-1 could not join (" in texts[0] and "no memory for the model" in texts[0]
    assert "rollout-2 could not join (" in texts[1] and len(texts) == 2


@pytest.mark.slow
def test_a_guest_that_is_asked_to_leave_before_it_serves_never_serves(ray_cluster):
    async def work(rollouts, team):
        reached = asyncio.Event()

        async def catch_up(worker):
            reached.set()
            await asyncio.sleep(HANG_S)

        team.catch_up = catch_up
        joining = team.join(1, here())
        async with asyncio.timeout(HANG_S):
            await reached.wait()
            await team.leave(1, "a test", within_s=HANG_S)
            await joining
        assert team.guests() == {} and len(await sampled(rollouts)) == 1
        assert team.metrics()["engines/joined"] == 0.0

    session(work)


@pytest.mark.slow
def test_a_guest_that_joins_while_the_policy_is_replaced_gets_the_weights_of_the_new_one(ray_cluster):
    async def work(rollouts, team):
        caught_up = []

        async def catch_up_with_new(worker):
            caught_up.append("new")

        async def catch_up_with_old(worker):
            caught_up.append("old")
            team.catch_up = catch_up_with_new

        team.catch_up = catch_up_with_old
        await team.join(1, here())
        assert caught_up == ["old", "new"] and len(team.alive()) == 2

    session(work)


@pytest.mark.slow
def test_a_join_that_ends_with_the_policy_leaves_the_others_as_they_are(ray_cluster):
    async def work(rollouts, team):
        async def catch_up(worker):
            raise StateLost("policy-0 is lost")

        team.catch_up = catch_up
        await team.join(1, here())
        team.check()
        assert team.guests() == {} and team.is_whole

    session(work)


@pytest.mark.slow
def test_a_guest_does_not_leave_in_the_middle_of_a_sync(ray_cluster):
    async def work(rollouts, team):
        team.between_syncs = asyncio.Lock()
        await team.join(1, here())
        async with team.between_syncs:
            leaving = asyncio.create_task(team.leave(1, "a test", within_s=HANG_S))
            await asyncio.sleep(0.3)
            assert rollouts.workers[1] in team.alive()
        async with asyncio.timeout(HANG_S):
            await leaving
        assert len(team.alive()) == 1

    session(work)


@pytest.mark.slow
def test_engines_join_while_nodes_have_room_and_leave_when_it_is_needed(ray_cluster, monkeypatch):
    node, rooms, drained, placed = here(), [1], {}, [True]
    monkeypatch.setattr("actors.placement.elasticity.draining", lambda: dict(drained))
    monkeypatch.setattr(
        "actors.placement.elasticity.rooms", lambda cpus, gpus, count, in_use: [node] * min(count, rooms[0])
    )

    async def work(rollouts, team):
        elasticity = Elasticity(team, ACTORS.guests, lambda: placed[0])

        async def after_a_look():
            await elasticity.look()
            async with asyncio.timeout(HANG_S):
                while team._replacing or elasticity._tasks:
                    await asyncio.sleep(0.02)
            return len(team.alive())

        assert await after_a_look() == 2  # one room
        rooms[0] = 9
        assert await after_a_look() == 3  # the limit of the configuration
        placed[0] = False  # a reserved actor waits for room
        assert await after_a_look() == 1  # reserved engines stay
        placed[0], rooms[0] = True, 1
        assert await after_a_look() == 2
        drained[node], rooms[0] = 60.0, 0
        assert await after_a_look() == 1

    session(work)
