"""From the command line to the loss in at most ten calls, as the stack shows them. One of the calls goes
through Ray: the driver's half ends with it, the rank's begins.
"""

import asyncio
import sys
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import actors.cluster
from actors.lifecycle.actor_spec import ActorSpec
from actors.workers import policy_group
from actors.workers.policy import PolicyWorker
from grpo_dist.cli import main
from grpo_dist.policy import trainer
from tests.support import fakes, made_groups
from tests.support.documents import ROOT
from tests.support.forked_ranks import Remote
from tests.support.good_inputs import CONFIG, GOOD, write
from tests.support.real_ranks import on_all, start

DRIVER = ["main", "_train", "train", "_session", "run", "PolicyGroup.update", "PolicyGroup._each"]
RANK = ["PolicyWorker.update", "Trainer.update", "Trainer.accumulate", "batch_loss"]


def own_frames() -> list[str]:
    """Return the functions of the project on the stack, the outermost first. A comprehension is none."""
    frame, found = sys._getframe(1), []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        own = path.is_relative_to(ROOT / "grpo_dist") or path.is_relative_to(ROOT / "actors")
        if own and not frame.f_code.co_name.startswith("<"):
            found.append(frame.f_code.co_qualname)
        frame = frame.f_back
    return found[::-1]


def test_the_command_line_is_at_most_10_calls_from_the_loss():
    calls = len(DRIVER) - 1 + len(RANK)
    assert calls <= 10


class FakeRank:
    """An actor's handle. It notes the stack of the driver where it asks for an update."""

    stack: list[str]

    def __getattr__(self, method):
        return Remote(lambda *_: self._answer(method))

    async def _done(self, value):
        return value

    def _answer(self, method):
        if method == "update":
            FakeRank.stack = own_frames()
        return self._done({"update": {"loss/policy": 0.0}}.get(method, True))


def test_the_driver_asks_the_ranks_after_this_path(tmp_path, monkeypatch):
    class FakeCluster:
        def __init__(self, config, teacher_dirs, wanted_engines):
            self._config = config

        async def __aenter__(self):
            return self

        async def __aexit__(self, *_):
            pass

        async def where_stuck(self):
            return ""

        @asynccontextmanager
        async def failures_as_state_lost(self):
            yield

        async def start_training(self, model_dir):
            spec = policy_group.PolicySpec.of(self._config, model_dir)
            group = policy_group.PolicyGroup(spec, ActorSpec(), timeouts=self._config.cluster.timeouts)
            return replace(fakes.World().workers(), policy=group)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(actors.cluster, "Cluster", FakeCluster)
    monkeypatch.setattr(policy_group, "one_at_a_time", lambda _: Remote(FakeRank))
    monkeypatch.setattr(policy_group.ray, "put", lambda value: value)
    write("train.jsonl", GOOD)
    (tmp_path / "config.yaml").write_text(CONFIG)
    settings = ["steps=1", "health.min_signal_groups=0", "checkpoint.export=false", "tracking.samples=false"]
    settings += ["evaluation={before: false, after: false}", "tracking.tensorboard=false"]
    assert main(["train", "config.yaml", *settings]) == 0
    assert FakeRank.stack == DRIVER


class NotingRank(PolicyWorker):
    """A rank that notes the stack where the loss is computed."""

    def start(self, *arguments):
        found, self.stacks = trainer.batch_loss, []

        def noted(*inputs, **keywords):
            self.stacks.append([*own_frames(), found.__qualname__])
            return found(*inputs, **keywords)

        trainer.batch_loss = noted
        return super().start(*arguments)

    def noted(self):
        return self.stacks


@pytest.mark.machine
def test_a_rank_computes_the_loss_after_this_path(forked_ranks, tiny_model):
    async def update():
        group = start(tiny_model, ranks=1, stage=0, worker=NotingRank)
        await group.ready()
        await group.update(group.stage([made_groups.batch()]))
        (stacks,) = await on_all(group, "noted")
        await group.shutdown()
        return stacks

    assert asyncio.run(update()) == [RANK]
