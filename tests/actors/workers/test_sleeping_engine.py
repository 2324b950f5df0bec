"""Actions of a rollout worker around the sleep of an engine on GPUs; the engine is a fake."""

import asyncio

import pytest
import torch

from actors.workers import rollout
from actors.workers.rollout import RolloutWorker
from tests.support.engine_arguments import spec


class SleepingEngine:
    """Records its calls."""

    def __init__(self, log):
        self.log = log

    async def sleep(self, level):
        self.log.append(f"sleep {level}")

    async def wake_up(self, tags):
        self.log.append(f"wake {tags}")

    async def in_workers(self, function):
        return [function(None)]


def log_of(monkeypatch, device, *calls):
    """Return the calls to the engine, and when the cache of pinned memory is emptied."""
    log = []
    monkeypatch.setattr(rollout, "device_type", lambda: device)
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: log.append("empty"))
    worker = RolloutWorker(spec())
    worker._engine = SleepingEngine(log)
    worker.forget_weights = lambda: asyncio.sleep(0)

    async def run():
        for name, argument in calls:
            await getattr(worker, name)(argument)

    asyncio.run(run())
    return log


def test_pinned_memory_of_kept_weights_is_given_back_once_they_are_awake(monkeypatch):
    calls = ("sleep", True), ("wake_up", None), ("sleep", False), ("wake_up", ["weights"])
    log = log_of(monkeypatch, "cuda", *calls)
    assert log == ["sleep 1", "wake None", "empty", "sleep 2", "wake ['weights']"]


@pytest.mark.parametrize(("tags", "empties"), [(["kv_cache"], 0), (["weights"], 1), (None, 1)])
def test_pinned_memory_is_given_back_only_with_the_weights(monkeypatch, tags, empties):
    assert log_of(monkeypatch, "cuda", ("sleep", True), ("wake_up", tags)).count("empty") == empties
    assert "empty" not in log_of(monkeypatch, "cpu", ("sleep", True), ("wake_up", tags))
