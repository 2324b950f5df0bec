"""The deadline of the ranks' process group: above those of all stages, and that of every later group."""

import asyncio
import os
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from actors.workers.policy import PolicyGroup, PolicySpec
from grpo_dist.config import TimeoutsConfig
from grpo_dist.policy import ranks
from grpo_dist.policy.sequence_parallel import SequenceGroup
from grpo_dist.runtime.rendezvous import Rank


class StartedRanks(PolicyGroup):
    """The policy's handle; keeps what two ranks are started with."""

    def __init__(self, timeouts):
        self._timeouts, self._spec = timeouts, PolicySpec(None, None, "model", None)
        self.team = SimpleNamespace(watch=lambda: None, starting=set())
        rank = SimpleNamespace(address=_Call(("127.0.0.1", 1)), health=_Call(None))
        self.ranks = [rank, rank]

    async def _each(self, method, arguments, group=None):
        self.deadlines = [rank.timeout_s for rank, *_ in arguments]
        return [("cpu", 0.0)] * len(arguments)


class _Call:
    def __init__(self, answer):
        self._answer = answer

    async def remote(self):
        return self._answer


@pytest.mark.parametrize("stage", ["start_s", "update_s", "sync_s", "save_s"])
def test_no_collective_ends_before_the_deadline_of_its_stage(stage):
    """In an export, all ranks wait in a collective for the one that writes."""
    group = StartedRanks(timeouts := TimeoutsConfig(**{stage: 7200.0}))
    asyncio.run(group.ready())
    expected = timeouts.up_s if stage == "start_s" else 7200.0  # the driver's deadline
    assert group.deadlines == [expected, expected]


def test_groups_without_a_deadline_have_the_deadline_of_the_ranks(monkeypatch):
    """DeepSpeed calls `new_group` without one."""
    passed = {}
    for name in ("default_pg_nccl_timeout", "default_pg_timeout"):
        monkeypatch.setattr(distributed_c10d, name, timedelta(minutes=10))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(ranks, "meeting_point", lambda rank: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **settings: passed.update(settings))
    ranks.join(Rank(0, 1, "127.0.0.1", 1, timeout_s=12.0))
    assert passed["timeout"] == timedelta(seconds=12)
    for backend in (dist.Backend.NCCL, dist.Backend.GLOO):
        assert distributed_c10d._get_default_timeout(backend) == timedelta(seconds=12)


def test_ranks_that_share_sequences_have_it_too(monkeypatch):
    groups = []
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "new_group", lambda members, timeout: groups.append((members, timeout)))
    joined = SequenceGroup.join(2, 12.0)
    assert groups == [([0, 1], timedelta(seconds=12)), ([2, 3], timedelta(seconds=12))]
    assert (joined.size, joined.index) == (2, 1)
