"""Cache that sequences give up: what is counted, by hand."""

from types import SimpleNamespace

from actors.workers.preemptions import Preemptions


def request(name, preemptions, tokens=10):
    return SimpleNamespace(request_id=name, num_preemptions=preemptions, num_tokens=tokens)


def test_each_preemption_counts_once():
    scheduler = SimpleNamespace(waiting=[request("new", 0)])
    preemptions = Preemptions(scheduler)
    assert preemptions.since() == 0
    scheduler.waiting = [request("a", 1, 30), request("b", 1, 12), request("new", 0)]
    assert preemptions.since() == 42
    assert preemptions.since() == 0  # the same two still wait
    scheduler.waiting = [request("c", 1, 5), *scheduler.waiting]
    assert preemptions.since() == 5
    scheduler.waiting = [request("a", 2, 31), request("new", 0)]  # ran meanwhile
    assert preemptions.since() == 31


def test_a_weight_sync_that_empties_the_cache_does_not_count():
    scheduler = SimpleNamespace(waiting=[])
    preemptions = Preemptions(scheduler)
    scheduler.waiting = [request("a", 1), request("b", 1)]
    preemptions.disregard()
    assert preemptions.since() == 0
