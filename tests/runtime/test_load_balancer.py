"""The load balancer serves groups in order, each by the least loaded worker with capacity."""

import asyncio
import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_dist.runtime.load_balancer import LoadBalancer
from tests.support.patience import HANG_S


def run_async(test):
    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(test(*args, **kwargs))

    return run


@run_async
async def test_a_group_goes_to_the_worker_with_the_fewest_outstanding_tokens_among_those_with_capacity():
    load_balancer = LoadBalancer(3, capacity=4)
    assert [await load_balancer.admit(2, tokens) for tokens in (50, 10, 30)] == [0, 1, 2]
    assert await load_balancer.admit(2, 5) == 1
    assert await load_balancer.admit(2, 5) == 2  # worker 1 has the fewest tokens and no capacity
    load_balancer.release(0, 2, 50)
    assert await load_balancer.admit(9, 1) == 0  # an idle worker takes even a group above its capacity


@run_async
async def test_a_preferred_worker_takes_a_group_only_where_its_load_equals_the_least():
    load_balancer = LoadBalancer(3, capacity=4)
    assert await load_balancer.admit(2, 100, prefer=2) == 2
    assert await load_balancer.admit(2, 104, prefer=2) == 0  # it has more sequences than another
    assert await load_balancer.admit(2, 90, prefer=0) == 1
    # All have two sequences; 104 exceeds 90 by less than one group.
    assert await load_balancer.admit(2, 95, prefer=0) == 0
    assert await load_balancer.admit(2, 10, prefer=2) == 1  # 100 against 90
    assert await load_balancer.admit(2, 10, prefer=1) == 2  # full

    load_balancer = LoadBalancer(2, capacity=4)
    load_balancer.close(1)
    assert await load_balancer.admit(1, 1, prefer=1) == 0
    load_balancer.withdraw(0)
    load_balancer.restore(1)
    assert await load_balancer.admit(1, 1, prefer=0) == 1


@run_async
async def test_waiting_groups_are_served_in_order_and_cancelled_ones_are_skipped():
    load_balancer = LoadBalancer(1, capacity=4)
    order = []

    async def admit(name, sequences):
        await load_balancer.admit(sequences, 1)
        order.append(name)

    await admit("running", 4)
    waiting = [asyncio.create_task(admit(*request)) for request in (("large", 3), ("gone", 1), ("small", 1))]
    await asyncio.sleep(0)
    waiting[1].cancel()
    await asyncio.sleep(0)
    load_balancer.release(0, 2, 0)
    await asyncio.sleep(0)
    assert order == ["running"]  # the small one would fit, but the large one is first
    load_balancer.release(0, 2, 1)
    await asyncio.gather(*waiting, return_exceptions=True)
    assert order == ["running", "large", "small"]


async def full_balancer():
    """Return a balancer whose only worker is full, and a task that waits for admission."""
    load_balancer = LoadBalancer(1, capacity=1)
    await load_balancer.admit(1, 1)
    waiting = asyncio.create_task(load_balancer.admit(1, 1))
    await asyncio.sleep(0)
    return load_balancer, waiting


@run_async
async def test_a_slot_given_to_a_group_that_is_cancelled_at_that_moment_is_freed():
    load_balancer, waiting = await full_balancer()
    load_balancer.release(0, 1, 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    async with asyncio.timeout(HANG_S):
        assert await load_balancer.admit(1, 1) == 0


@run_async
async def test_a_lost_worker_holds_no_slots_and_gets_no_group_until_it_returns():
    load_balancer = LoadBalancer(2, capacity=4)
    assert [await load_balancer.admit(4, tokens) for tokens in (10, 20)] == [0, 1]
    waiting = asyncio.create_task(load_balancer.admit(4, 5))
    load_balancer.withdraw(0)
    load_balancer.release(0, 4, 10)  # a late release of the lost worker
    await asyncio.sleep(0)
    assert not waiting.done()
    load_balancer.release(1, 4, 20)
    assert await waiting == 1
    waiting = asyncio.create_task(load_balancer.admit(4, 5))
    await asyncio.sleep(0)
    load_balancer.restore(0)
    assert await waiting == 0
    load_balancer.release(0, 4, 5)
    assert await load_balancer.admit(1, 1) == 0  # the worker without requests


@run_async
async def test_a_failure_is_raised_to_all_waiting_and_later_groups():
    load_balancer, waiting = await full_balancer()
    load_balancer.fail(RuntimeError("no engine is left"))
    for late in (waiting, load_balancer.admit(1, 1)):
        with pytest.raises(RuntimeError, match="no engine is left"):
            await late


@settings(max_examples=60)
@given(
    workers=st.integers(1, 5),
    capacity=st.integers(1, 8),
    sizes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 90)), max_size=60),
    rng=st.randoms(use_true_random=False),
)
@run_async
async def test_every_group_runs_within_the_capacity_and_free_capacity_is_used(workers, capacity, sizes, rng):
    """Compare with a plain search over all workers."""
    load_balancer = LoadBalancer(workers, capacity)
    sequences, tokens, running = [0] * workers, [0] * workers, []

    async def admit(size, cost):
        index = await load_balancer.admit(size, cost)
        running.append((index, size, cost))
        assert sequences[index] == 0 or sequences[index] + size <= capacity
        sequences[index] += size
        tokens[index] += cost

    tasks = [asyncio.create_task(admit(*size)) for size in sizes]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting = len(sizes) - sum(task.done() for task in tasks)
        assert not waiting or 0 not in sequences
        index, size, cost = running.pop(rng.randrange(len(running)))
        sequences[index] -= size
        tokens[index] -= cost
        load_balancer.release(index, size, cost)
    await asyncio.gather(*tasks)


@run_async
async def test_groups_behind_a_cancelled_one_are_served_at_once():
    load_balancer = LoadBalancer(1, capacity=4)
    await load_balancer.admit(2, 1)
    large, small = (asyncio.create_task(load_balancer.admit(n, 1)) for n in (4, 2))
    await asyncio.sleep(0)
    large.cancel()
    async with asyncio.timeout(HANG_S):
        assert await small == 0


def test_a_release_visits_no_group_that_does_not_fit(monkeypatch):
    """With 1000 waiting groups, a release visits the group it serves and the next, which does not fit."""

    async def session():
        load_balancer, calls = LoadBalancer(4, capacity=8), 0
        take = load_balancer._take

        def count_take(*arguments):
            nonlocal calls
            calls += 1
            return take(*arguments)

        monkeypatch.setattr(load_balancer, "_take", count_take)

        async def run_group():
            index = await load_balancer.admit(8, 1000)
            await asyncio.sleep(0)
            load_balancer.release(index, 8, 1000)

        await asyncio.gather(*(run_group() for _ in range(1000)))
        return calls

    assert asyncio.run(session()) <= 3 * 1000


def test_a_release_looks_at_its_own_worker_alone():
    """With 500 full workers and a waiting group, a finished sample must not visit all workers."""

    class Unseen(list):
        def __iter__(self):
            raise AssertionError("looked at all workers")

    async def session():
        load_balancer = LoadBalancer(500, capacity=8)
        assert [await load_balancer.admit(8, 800) for _ in range(500)] == list(range(500))
        waiting = asyncio.create_task(load_balancer.admit(8, 800))
        await asyncio.sleep(0)
        load_balancer._loads = Unseen(load_balancer._loads)
        for sample in range(8):
            assert not waiting.done(), sample
            load_balancer.release(123, 1, 100)
        assert await waiting == 123

    asyncio.run(session())


@settings(max_examples=25)
@given(workers=st.integers(1, 6), capacity=st.integers(1, 8), order=st.randoms(use_true_random=False))
@run_async
async def test_a_group_goes_where_a_search_of_all_workers_sends_it(workers, capacity, order):
    """Also while workers are lost, closed and restored."""
    load_balancer = LoadBalancer(workers, capacity)
    sequences, tokens, running, away = [0] * workers, [0] * workers, [], set()
    for _ in range(120):
        worker = order.randrange(workers)
        action = order.choice(["admit", "admit", "release", "withdraw", "close", "restore"])
        size, cost = order.randint(1, 6), order.randint(0, 30)
        serving = [i for i in range(workers) if i not in away]
        room = [i for i in serving if not sequences[i] or sequences[i] + size <= capacity]
        if action == "admit" and room:
            index = await load_balancer.admit(size, cost)
            assert index == min(room, key=lambda i: (tokens[i], i))
            running.append((index, size, cost))
            sequences[index] += size
            tokens[index] += cost
        elif action == "release" and running:
            index, size, cost = running.pop(order.randrange(len(running)))
            load_balancer.release(index, size, cost)
            sequences[index] -= size
            tokens[index] -= cost
        elif action == "restore" and worker in away:
            away.discard(worker)
            load_balancer.restore(worker)
        elif action == "close" and worker not in away:
            away.add(worker)
            load_balancer.close(worker)
        elif action == "withdraw" and worker not in away:
            away.add(worker)
            load_balancer.withdraw(worker)
            running = [entry for entry in running if entry[0] != worker]
            sequences[worker] = tokens[worker] = 0


@run_async
async def test_a_smaller_group_behind_a_served_one_goes_where_that_did_not_fit():
    load_balancer = LoadBalancer(2, capacity=4)
    assert [await load_balancer.admit(n, 1) for n in (4, 2)] == [0, 1]
    large, small = (asyncio.create_task(load_balancer.admit(n, 1)) for n in (4, 2))
    await asyncio.sleep(0)
    load_balancer.release(0, 4, 1)
    async with asyncio.timeout(HANG_S):
        assert [await large, await small] == [0, 1]


@run_async
async def test_a_closed_worker_takes_no_waiting_group_when_it_releases_one():
    load_balancer, waiting = await full_balancer()
    load_balancer.close(0)
    load_balancer.release(0, 1, 1)
    await asyncio.sleep(0)
    assert not waiting.done()
    load_balancer.restore(0)
    async with asyncio.timeout(HANG_S):
        assert await waiting == 0
