"""Real ZeRO ranks: one dies, hangs, or loses its connection in the middle of an update."""

import asyncio
import os
import signal

import psutil
import pytest

from grpo_dist.config import RestartsConfig
from grpo_dist.errors import StateLost
from tests.support import made_groups
from tests.support.patience import HANG_S
from tests.support.real_ranks import OpenWorker, on_all, start

pytestmark = [pytest.mark.machine, pytest.mark.slow]


class MortalRank(OpenWorker):
    def arm(self, rank, what):
        self._what = what if rank == self._trainer.rank.index else None
        return os.getpid()

    def update(self, *arguments):
        what = getattr(self, "_what", None)
        if isinstance(what, Exception):
            raise what
        if what is not None:
            os.kill(os.getpid(), what)
        return super().update(*arguments)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (signal.SIGKILL, "policy-1 is lost"),
        pytest.param(signal.SIGSTOP, "policy-1 is lost", marks=pytest.mark.slow),
        pytest.param(
            RuntimeError("Connection closed by peer"),
            r"failed \(Connection closed by peer\)",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_caller_of_the_policy_learns_of_a_lost_rank_while_other_ranks_wait_for_it(
    ray_cluster, tiny_model, tmp_path, what, words
):
    """The other rank is in a collective that would block for half an hour."""

    async def lose():
        restarts = RestartsConfig(hang_s=10)
        group = start(tiny_model, ranks=2, stage=2, worker=MortalRank, restarts=restarts)
        await group.ready()
        staged = group.stage([made_groups.batch()])
        await group.update(staged)
        processes = await on_all(group, "arm", 1, what)
        with pytest.raises(StateLost, match=words):
            await group.update(staged)
        if isinstance(what, signal.Signals):
            with pytest.raises(StateLost, match=words):  # and later callers
                await group.save(tmp_path)
        await group.shutdown()
        return processes

    processes = asyncio.run(lose())
    _, alive = psutil.wait_procs([psutil.Process(p) for p in processes if psutil.pid_exists(p)], HANG_S)
    assert not alive  # neither the stopped rank nor the waiting one


def test_an_error_raised_by_a_rank_is_not_a_lost_rank(ray_cluster, tiny_model):
    async def refuse():
        group = start(tiny_model, ranks=1, stage=2, worker=MortalRank)
        await group.ready()
        await on_all(group, "arm", 0, ValueError("no such batch"))
        with pytest.raises(ValueError, match="no such batch"):
            await group.update(group.stage([made_groups.batch()]))
        await group.shutdown()

    asyncio.run(refuse())
