"""The environment worker without Ray: batches of actions, and episodes that end."""

import asyncio

from actors.workers.environment import Act
from grpo_dist.environments.base import Problem
from grpo_dist.environments.records import Action, Observed
from grpo_dist.types import Task
from tests.support.patience import HANG_S
from tests.support.toy_environments import ToyWorker


def act(episode, turn=0, **kwargs):
    return Act(episode, Task("toy", {"turns": 3} | kwargs), Problem("p", "1"), Action("abc"), turn)


def with_worker(play):
    async def session():
        worker = ToyWorker(None)
        await worker.start()
        return await asyncio.wait_for(play(worker), HANG_S)

    return asyncio.run(session())


def test_quick_answers_come_at_once_and_slow_ones_when_they_are_there():
    async def play(worker):
        at_once = await worker.act([act("e:0"), act("e:1", seconds=0.5), act("e:2")])
        return at_once, await worker.answer("e:1")

    at_once, late = with_worker(play)
    assert at_once == [Observed("p0:3"), None, Observed("p0:3")]
    assert late == Observed("p0:3")


def test_episodes_that_end_take_what_they_wait_for_with_them():
    async def play(worker):
        await worker.hold(True)
        assert await worker.act([act("e:0"), act("e:1"), act("f:0")]) == [None] * 3
        await worker.end(["e:0", "e:9"])
        left = await worker.running()
        await worker.end_all("e")
        late = await worker.act([act("e:2")])  # sent before its engine was lost
        return left, await worker.running(), late

    left, after, late = with_worker(play)
    assert (left, after) == ({"e:1": 1, "f:0": 1}, {"f:0": 1})
    assert late == [Observed(failed="the engine is lost")]
