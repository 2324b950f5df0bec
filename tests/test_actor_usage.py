"""What actors did is told also by those that have work of later batches before them."""

import asyncio
import threading

import ray

from actors.calls import one_at_a_time
from actors.usage import ActorUsage
from grpo_dist.usage import Metered, metered


class Slow(Metered):
    def __init__(self):
        super().__init__()
        self._go, self._order = threading.Event(), []

    @metered("work")
    def work(self, number):
        assert self._go.wait(60)
        self._order.append(number)
        return list(self._order)

    def go(self):
        self._go.set()


def test_an_actor_with_a_queue_tells_what_it_did_without_working_it_off(ray_cluster):
    actor = one_at_a_time(Slow).options(num_cpus=0).remote()
    queued = [actor.work.remote(number) for number in range(4)]
    usage = ActorUsage({"reference": [actor]}, queueing={"reference"}, timeout_s=60)
    assert "memory/reference_gib" in asyncio.run(usage.read())
    assert not ray.wait(queued, num_returns=1, timeout=0)[0]  # nothing is finished, yet it answered
    ray.get(actor.go.options(concurrency_group="beside").remote())
    assert ray.get(queued)[-1] == [0, 1, 2, 3]  # one at a time, in order
    assert asyncio.run(usage.read())["time/reference_work_busy_s"] > 0
    ray.kill(actor)
