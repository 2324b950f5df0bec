"""Order of prompts under dynamic sampling: every prompt of an epoch is sampled once."""

import random
from collections import Counter, deque

import numpy as np
import pytest

from grpo_dist.data.order import OrderState, shuffled, step_prompts
from grpo_dist.data.stream import PromptStream
from tests.support import fakes
from tests.support.made_groups import group


def stream(n, per_batch, *, seed=0, state=None):
    return PromptStream(fakes.prompts(n), per_batch, seed=seed, state=state or OrderState())


def of(prompts):
    """Return groups of these prompts."""
    return [group(i, np.random.default_rng(0), samples=2) for i in prompts]


def test_returned_prompts_come_first_in_the_next_batch():
    order = [int(i) for i in shuffled(9, 0, 0)]
    own = stream(9, 4)
    first = own.take(0)
    assert first == [0, 1, 2, 3] and [own.prompt(place) for place in first] == order[:4]
    own.trained(first, of(order[:2]))
    assert own.state == OrderState(4, (2, 3))
    assert own.take(1) == [2, 3, 4, 5]


def test_prompts_returned_by_a_batch_in_flight_queue_behind_older_ones():
    own = stream(40, 4)
    first, second = own.take(0), own.take(1)
    own.trained(second, of([own.prompt(4)]))
    own.trained(first, of(own.prompt(place) for place in (0, 2)))
    assert own.state == OrderState(8, (1, 3, 5, 6, 7))


def test_no_prompt_is_in_a_batch_twice_and_the_postponed_one_waits():
    """Batches of three from four prompts: the second takes the last of epoch 0 and two others of epoch 1."""
    own = stream(4, 3)
    own.trained(own.take(0), of(range(4)))
    again = own.take(1)
    assert again[0] == 3 and len({own.prompt(place) for place in again}) == 3
    passed_over = [place for place in range(own.state.position) if place > 3 and place not in again]
    assert all(own.prompt(place) == own.prompt(3) for place in passed_over)
    assert own.state.waiting == tuple(passed_over)


def test_without_returned_prompts_it_is_the_plain_order():
    own = stream(10, 4, seed=5)
    for step in range(30):
        places = own.take(step)
        prompts = [own.prompt(place) for place in places]
        assert sorted(prompts) == sorted(step_prompts(10, 4, 5, step))
        own.trained(places, of(prompts))


@pytest.mark.parametrize(
    ("n", "own", "further", "ahead"), [(40, 4, 12, 0), (40, 4, 12, 2), (7, 3, 4, 1), (5, 5, 0, 3)]
)
def test_every_prompt_of_an_epoch_is_sampled_once(n, own, further, ahead):
    """Random batches of ``own`` to ``own + further`` prompts, several in flight, with interruptions."""
    chance, counted = random.Random(n + ahead), Counter()
    order, launched = stream(n, own + further), deque()
    for batch in range(300):
        while len(launched) <= ahead:
            launched.append(order.take(batch))
        if chance.random() < 0.2:
            order = stream(n, own + further, state=order.state)
        places = launched.popleft()
        prompts = [order.prompt(place) for place in places]
        assert len(set(prompts)) == own + further
        needed = prompts[: own + chance.randint(0, further)]
        counted.update(f"p{i}" for i in needed)
        order.trained(places, of(needed))
        assert len(order.state.waiting) <= (ahead + 3) * n
    assert order.sampled(place for places in launched for place in places) == counted
    while launched:
        order.trained(launched.popleft(), [])
    assert order.sampled() == counted
    least, most = min(counted.values()), max(counted.values())
    together = (own + further) * (ahead + 1)  # if that is more than an epoch, epochs run side by side
    assert len(counted) == n and most - least <= (2 if together <= n else ahead + 2)


def test_more_prompts_per_batch_than_prompts_is_rejected():
    with pytest.raises(ValueError, match="5 prompts a batch cannot be drawn from 4"):
        stream(4, 5)
