"""The loop of supervised training on fakes: batches, measurements, checkpoints and resumes."""

import asyncio
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from grpo_dist.batch.sharding import COMPUTED_TOKENS
from grpo_dist.config import SupervisedConfig
from grpo_dist.data.demonstrations import Demonstration
from grpo_dist.errors import Preempted
from grpo_dist.health import HealthState
from grpo_dist.loop import supervised
from grpo_dist.loop.progress import Progress
from grpo_dist.workers import NO_SAMPLING, Workers
from tests.support import fakes


def demonstrations(count, start=0):
    return [
        Demonstration(
            f"d{i}", np.array([7, i + 20], np.int32), "", "made", f"made:{i}",
            completion_ids=np.arange(1, 2 + i % 3, dtype=np.int32),
        )
        for i in range(start, start + count)
    ]  # fmt: skip


def config(steps=6, batch_size=4, **changes):
    sft = {"model": "demo:tiny", "data": "demo:add3", "steps": steps, "batch_size": batch_size}
    sft |= {"max_length": 16, "validate_every": 2, **changes.pop("sft", {})}
    return SupervisedConfig.from_config(fakes.config(model={"path": "sft"}, sft=sft, **changes))


class Job(fakes.World):
    """Ranks, recorder and checkpoints in one. ``skip``: steps whose update is refused."""

    def __init__(self, skip=(), stop_after=None):
        super().__init__()
        self.skip, self.stop_after, self.measured = skip, stop_after, []

    def workers(self):
        return Workers(NO_SAMPLING, NO_SAMPLING, None, self, NO_SAMPLING)

    async def update(self, batches, *, kl_coef, bounds):
        self.updates.append(batches)
        skipped = len(self.updates) in self.skip
        return {"loss/total": 1.0, "health/skipped_updates": float(skipped), "health/bad_weights": 0.0}

    async def logprobs(self, batch):
        """Return minus the number of tokens of a row as its log-probs."""
        self.measured.append(len(batch))
        lengths = batch.policy.mask.sum(dim=1).tolist()
        return "float32", {
            row: np.full(n, -n, np.float32) for row, n in zip(batch.row_ids.tolist(), lengths, strict=True)
        }

    def run(self, settings, train, held_out=(), **how):
        asyncio.run(
            supervised.run(
                settings, self.workers(), train, held_out, self, self,
                stop_requested=lambda: len(self.updates) == self.stop_after, **how,
            )
        )  # fmt: skip
        return self


def trained_rows(job):
    """Return the prompts of each update, as the number in their second token."""
    return [(batch.tokens[:, 1] - 20).tolist() for (batch,) in job.updates]


def test_every_demonstration_is_trained_on_once_an_epoch_in_an_order_of_the_seed():
    batches = trained_rows(Job().run(config(steps=5), demonstrations(10)))  # two epochs
    assert [len(rows) for rows in batches] == [4] * 5
    flat = [row for rows in batches for row in rows]
    assert set(flat[:10]) == set(range(10)) and Counter(flat) == dict.fromkeys(range(10), 2)
    assert flat[:10] != flat[10:]
    assert trained_rows(Job().run(config(steps=5), demonstrations(10))) == batches
    assert trained_rows(Job().run(config(steps=5, sft={"seed": 1}), demonstrations(10))) != batches


def test_fewer_demonstrations_than_a_batch_come_several_times_in_it():
    (rows,) = trained_rows(Job().run(config(steps=1, batch_size=7), demonstrations(3)))
    assert Counter(rows) in [{0: 3, 1: 2, 2: 2}, {0: 2, 1: 3, 2: 2}, {0: 2, 1: 2, 2: 3}]


def test_the_completion_alone_is_trained_and_all_of_the_batch_s_tokens_are_the_denominator():
    job = Job().run(config(steps=1, batch_size=3), demonstrations(3))
    ((batch,),) = job.updates
    order = (batch.tokens[:, 1] - 20).tolist()
    assert batch.denominators.tokens == 6.0 and batch.lengths.tolist() == [3 + i for i in order]
    for row, i in enumerate(order):
        assert batch.policy.mask[row].tolist() == [2 <= t < 3 + i for t in range(batch.tokens.shape[1])]
    metrics = job.logged[1]
    assert (metrics["train/rows"], metrics["train/tokens"], metrics["train/loss_tokens"]) == (3, 12, 6)
    assert metrics["train/epoch"] == 1.0 and metrics["throughput/tokens_per_s"] > 0


def test_what_demonstrations_begin_with_is_needed_once(monkeypatch):
    """A system prompt of 20 tokens and a 7, then one token that differs: 21 + 4 tokens, plus completions."""
    with_prefix = [
        replace(row, token_ids=np.r_[np.full(20, 99), row.token_ids].astype(np.int32))
        for row in demonstrations(4)
    ]

    async def update_computed(self, batches, *, kl_coef, bounds, _own=Job.update):
        return await _own(self, batches, kl_coef=kl_coef, bounds=bounds) | {COMPUTED_TOKENS: 64.0}

    monkeypatch.setattr(Job, "update", update_computed)
    job = Job().run(config(steps=1, batch_size=4, sft={"max_length": 40}), with_prefix)
    completions = sum(len(row.completion_ids) for row in with_prefix)
    needed = 21 + 4 + completions  # all begin with the 20 and a 7
    assert job.logged[1]["throughput/packing_efficiency"] == pytest.approx(needed / 64.0)


def test_validation_loss_is_the_mean_over_tokens_before_during_and_after():
    job = Job().run(config(steps=5), demonstrations(4), demonstrations(6))
    # Completions of 1, 2, 3, 1, 2, 3 tokens cost 1, 2, 3 nats a token.
    expected = 2 * (1 + 4 + 9) / 12
    assert {
        s: m["validation/loss"] for s, m in job.logged.items() if "validation/loss" in m
    } == pytest.approx(dict.fromkeys((0, 2, 4, 5), expected))
    assert job.measured == [4, 2] * 4


def test_a_stopped_training_saves_and_resumes_with_the_batches_and_measurements_of_an_unbroken_one():
    settings, train, held_out = config(steps=6), demonstrations(10), demonstrations(3)
    unbroken = Job().run(settings, train, held_out)
    stopped = Job(stop_after=2)
    with pytest.raises(Preempted, match="stopped on request; step 2 saved"):
        stopped.run(settings, train, held_out)
    assert list(stopped.saved) == [2]
    progress = stopped.saved[2]
    assert progress.evaluation_pending and "validation/loss" not in stopped.logged[2]
    rest = Job().run(settings, train, held_out, progress=progress)
    assert trained_rows(stopped) + trained_rows(rest) == trained_rows(unbroken)
    losses = {
        s: m["validation/loss"] for s, m in (stopped.logged | rest.logged).items() if "validation/loss" in m
    }
    assert set(losses) == {0, 2, 4, 6}


def test_supervised_training_compares_no_metric_of_evaluations():
    settings = fakes.config(
        data={"train": [{"path": "demo:add3"}], "eval": [{"path": "demo:add3", "name": "held"}]},
        evaluation={"every": 1},
        checkpoint={"keep_best": "eval/held/pass@1", "patience": 2, "target": 0.9},
        sft={"model": "demo:tiny", "data": "demo:add3", "steps": 3},
    )
    checkpoint = SupervisedConfig.from_config(settings).checkpoint
    assert (checkpoint.keep_best, checkpoint.patience, checkpoint.target) == (None, None, None)


def test_a_refused_update_is_reported_and_its_rows_are_kept():
    job = Job(skip=(2,)).run(config(steps=3), demonstrations(4))
    assert list(job.quarantined) == [2] and len(job.quarantined[2]) == 4
    assert any("step 2: 1 update(s) skipped" in warning for warning in job.warnings)


def test_a_step_that_was_rolled_back_from_is_not_trained_on():
    progress = Progress(health=HealthState(avoid=(2,)))
    job = Job().run(config(steps=3), demonstrations(4), progress=progress)
    assert len(job.updates) == 2 and job.logged[2]["train/loss_tokens"] == 0.0
