"""Libraries are imported without garbage collections."""

import gc
import weakref

import pytest

from grpo_dist.runtime.processes import freeze_loaded, pause_garbage_collection


@pytest.fixture(autouse=True)
def none_frozen():
    """Start without frozen objects: other threads may free some, which changes their count."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    yield
    gc.enable()
    gc.unfreeze()
    if frozen:
        gc.freeze()


def test_nothing_is_collected_meanwhile_and_later_collections_leave_out_what_there_is():
    with pause_garbage_collection():
        collections = gc.get_stats()[0]["collections"]
        objects = [[] for _ in range(5000)]
        assert gc.get_stats()[0]["collections"] == collections
    assert gc.isenabled() and gc.get_freeze_count() >= len(objects)


@pytest.mark.slow
def test_what_is_loaded_is_not_visited_again_and_what_is_garbage_by_then_is_freed():
    class Node:
        pass

    def cycle():
        node = Node()
        node.own = node
        return weakref.ref(node)

    before, loaded = cycle(), [Node() for _ in range(1000)]
    freeze_loaded()
    assert before() is None and gc.get_freeze_count() >= len(loaded)
    after = cycle()
    gc.collect()
    assert after() is None and not any(isinstance(o, Node) for o in gc.get_objects())
