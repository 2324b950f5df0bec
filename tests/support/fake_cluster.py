"""A cluster whose workers are a fake world, for code that starts a cluster of its own."""

from collections.abc import Callable
from typing import Any


def fake_cluster(worlds: list, make: Callable[[], Any]) -> type:
    """Return a class in place of `actors.cluster.Cluster`; each instance appends ``make()`` to ``worlds``."""

    class FakeCluster:
        def __init__(self, config):
            worlds.append(make())

        async def __aenter__(self):
            return self

        async def __aexit__(self, *exc):
            return None

        async def where_stuck(self):
            return ""

        async def start_evaluation(self, model_dir):
            return worlds[-1].workers()

    return FakeCluster
