"""Notices about draining nodes of the policy."""

import asyncio

import pytest
import ray

from actors.lifecycle.team import ActorSpec, Team
from actors.placement import elasticity
from actors.placement.elasticity import DrainNotice, leaving_nodes
from tests.support.patience import HANG_S

pytestmark = pytest.mark.machine


async def until(condition):
    async with asyncio.timeout(HANG_S):
        while not condition():
            await asyncio.sleep(0.01)


def test_only_the_nodes_that_hold_the_policy_count_and_a_failed_look_is_repeated(monkeypatch, caplog):
    answers = [{}, RuntimeError("Ray does not answer"), {"a": 60.0, "c": 9.0}, {"c": 9.0}]

    def draining():
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def session():
        notice = DrainNotice(["a", "b"])
        watching = asyncio.create_task(notice.run())
        await until(lambda: notice.leaving == {"a"})
        await until(lambda: notice.leaving == set())  # the node is gone, or kept after all
        watching.cancel()

    monkeypatch.setattr(elasticity, "_LOOK_S", 0.05)
    monkeypatch.setattr("actors.placement.elasticity.draining", draining)
    asyncio.run(session())
    assert "the notices of nodes are unknown now (" in caplog.text


@ray.remote
class Rank:
    def up(self):
        return None

    def close(self):
        return None


@pytest.mark.slow
def test_the_ranks_nodes_and_the_drivers_are_watched_until_the_team_ends(ray_cluster, monkeypatch):
    drained = {}
    monkeypatch.setattr(elasticity, "_LOOK_S", 0.05)
    monkeypatch.setattr("actors.placement.elasticity.draining", lambda: dict(drained))

    async def session():
        makers = [lambda _: Rank.options(num_cpus=0).remote()] * 2
        team = Team("policy", makers, ActorSpec(), start=lambda rank: rank.up.remote())
        await team.ready()
        leaving = await leaving_nodes(team, HANG_S)
        assert leaving() == set()
        drained["elsewhere"] = drained[ray.get_runtime_context().get_node_id()] = 60.0
        await until(leaving)
        assert leaving() == {ray.get_runtime_context().get_node_id()}
        await team.shutdown()
        drained.clear()
        await asyncio.sleep(0.2)
        assert leaving()  # nobody watches any more

    asyncio.run(session())
