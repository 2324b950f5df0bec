"""Real DeepSpeed ranks: helpers that start them and read their gradients and weights."""

import asyncio
import math
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import torch

from actors.lifecycle.team import ActorSpec
from actors.workers.policy import PolicyGroup, PolicySpec, PolicyWorker
from grpo_dist.config import (
    AlgorithmConfig,
    KLConfig,
    ModelConfig,
    OffloadConfig,
    OptimizerConfig,
    PolicyConfig,
    TimeoutsConfig,
)
from grpo_dist.policy.logit_mask import LogitMask
from grpo_dist.policy.loss import Objective, batch_loss, divergence_from_teacher
from grpo_dist.policy.packing import padded
from grpo_dist.policy.preparation import EntropyBonus
from grpo_dist.policy.trainer import TrainerSettings
from grpo_dist.runtime.hardware import thread_environment
from tests.support import losses, made_groups
from tests.support.made_groups import shard

TEMPERATURE = 0.9
ALGORITHM = AlgorithmConfig(kl=KLConfig(coef=0.1), correction="tis", aggregation="seq-mean-token-mean")
# For a batch with rewards, teachers and demonstrations.
STREAMS = losses.objective(
    kl={"coef": 0.05}, entropy={"coef": 0.01}, correction="tis", distillation={"coef": 0.7},
    aggregation="seq-mean-token-mean", demonstration_coef=0.3,
)  # fmt: skip


def loss_of_the_whole(module, batch, settings):
    """Return the loss of the whole ``batch`` of a `TokenLogprobs` in this process, without DeepSpeed."""
    layout = padded(batch.tokens, batch.wanted, batch.temperatures, teacher=batch.teacher)
    if batch.kept is not None:
        layout = replace(layout, mask=LogitMask.from_rows(batch, batch.wanted, batch.tokens.device))
    logprobs, entropy, candidates = module(layout, with_entropy=True)
    from_teacher = divergence_from_teacher(candidates, layout, settings.distillation)
    return batch_loss(logprobs, batch, settings, entropy=entropy, from_teacher=from_teacher)[0]


class OpenWorker(PolicyWorker):
    """A rank that exposes its gradients."""

    def gradients(self, batch):
        metrics = self._trainer.accumulate(batch)
        gradients = self._trainer.gradients()
        return gradients, metrics | self._trainer.step()

    def gradients_with(self, batch, objective):
        """Return gradients and metrics of another objective. No weight moves."""
        self._trainer._objective = objective
        self._trainer._bonus = EntropyBonus(objective.algorithm.entropy)
        metrics = self._trainer.accumulate(batch)
        gradients = self._trainer.gradients()
        self._trainer.step(limit=-math.inf)
        return gradients, metrics

    def spoil(self, rank, factor=torch.nan):
        """Multiply one parameter's gradient by ``factor``, only on ``rank``; None restores it."""
        if rank is None:
            self._spoiled.remove()
        else:
            factor = factor if rank == self._trainer.rank.index else 1.0
            first = next(self._trainer.engine.module.parameters())
            self._spoiled = first.register_hook(lambda gradient: gradient * factor)

    def weights(self):
        return {name: t.clone() for bucket in self._trainer.weights.buckets(10_000) for name, t in bucket}


class UpdatedWorker(OpenWorker):
    """A rank that makes an optimiser update and returns the weights with transformers' names."""

    def updated(self, batch):
        self._trainer.update([batch])
        buckets = self._trainer.weights.buckets(10_000, as_held=True)
        return {name: t.clone() for bucket in buckets for name, t in bucket}


def start(
    model_dir, *, ranks, stage, micro_batch_tokens=10_000, epochs=1, algorithm=ALGORITHM, objective=None,
    packing=True, shared=1, deepspeed=None, lora=None, dtype="float32", worker=OpenWorker, offload=None,
    restarts=None, **optimizer,
):  # fmt: skip
    settings = PolicyConfig(
        num_workers=ranks, zero_stage=stage, sequence_parallel=shared,
        optimizer=OptimizerConfig(**{"lr": 1e-3} | optimizer), deepspeed=deepspeed or {}, lora=lora,
        offload=offload or OffloadConfig(),
    )  # fmt: skip
    spec = PolicySpec(
        settings,
        ModelConfig(path="tiny", packing=packing, dtype=dtype),
        str(model_dir),
        TrainerSettings(
            objective=objective or Objective(algorithm), temperature=TEMPERATURE,
            token_budget=micro_batch_tokens, epochs=epochs, total_updates=10, seed=0,
        ),
    )  # fmt: skip
    options = {"num_cpus": 0, "runtime_env": {"env_vars": thread_environment(1)}}
    actors = ActorSpec(options, restarts=restarts)
    return PolicyGroup(spec, actors, timeouts=TimeoutsConfig(), worker=worker)


@asynccontextmanager
async def running(model_dir, **how):
    """Start ranks; shut them down at the end of the block."""
    group = start(model_dir, **how)
    await group.ready()
    yield group
    await group.shutdown()


async def on_all(group, method, *arguments):
    return await asyncio.gather(*(getattr(rank, method).remote(*arguments) for rank in group.ranks))


async def gradients_of(model_dir, batch, **how):
    async with running(model_dir, **how) as group:
        shared = how.get("shared", 1)
        shards = [s for s in shard(batch, how["ranks"] // shared) for _ in range(shared)]
        calls = [r.gradients.remote(s) for r, s in zip(group.ranks, shards, strict=True)]
        results = await asyncio.gather(*calls)
        weights = (await on_all(group, "weights"))[0]
    return results[0], weights


def comparable(metrics):
    """Return the metrics that do not depend on the layout of rows on ranks."""
    return {name: value for name, value in metrics.items() if not name.startswith("throughput/")}


def flat(gradients):
    return torch.cat([gradients[name].flatten().double() for name in sorted(gradients)])


def relative(a, b):
    return float((a - b).norm() / b.norm())


class AdaptedWorker(OpenWorker):
    """A rank that exposes its adapters and optimiser state."""

    def adapters(self):
        buckets = self._trainer.weights.buckets(10_000, adapters_only=True)
        return {name: t.clone() for bucket in buckets for name, t in bucket}

    def optimizer_elements(self):
        """Return the elements of Adam's first moment that this rank holds."""
        optimizer = getattr(self._trainer.engine.optimizer, "optimizer", self._trainer.engine.optimizer)
        return sum(state["exp_avg"].numel() for state in optimizer.state.values())


async def two_updates(model_dir, directory=None, *, ranks=2, **how):
    """Return the gradients of a first batch, its metrics, and the weights after a second batch.

    With ``directory``, checks that a group loaded from a checkpoint between the two gets the same weights.
    """
    first, second = made_groups.batch(seed=1), made_groups.batch(seed=2)
    how = {"ranks": ranks, "micro_batch_tokens": 40, "worker": AdaptedWorker} | how
    async with running(model_dir, **how) as group:
        shards = zip(group.ranks, shard(first, ranks), strict=True)
        (gradients, metrics), *_ = await asyncio.gather(*(r.gradients.remote(s) for r, s in shards))
        if directory is not None:
            await group.save(directory)
        await group.update(group.stage([second]))
        weights, *_ = await asyncio.gather(*(rank.weights.remote() for rank in group.ranks))
    if directory is not None:
        async with running(model_dir, **how) as again:
            await again.load(directory)
            await again.update(again.stage([second]))
            same, *_ = await asyncio.gather(*(rank.weights.remote() for rank in again.ranks))
        assert relative(flat(same), flat(weights)) < 1e-7
    return gradients, metrics, weights


def agree(ours, theirs):
    (gradients, metrics, weights), (expected, expected_metrics, expected_weights) = ours, theirs
    assert relative(flat(gradients), flat(expected)) < 1e-5
    assert metrics["policy/grad_norm"] == pytest.approx(expected_metrics["policy/grad_norm"], rel=1e-4)
    # A step is 1e-3. Adam divides by the gradient's size, which amplifies rounding of tiny gradients.
    gap = (flat(weights) - flat(expected_weights)).abs()
    assert float(gap.mean()) < 1e-6
    assert float(gap.max()) < 1e-3
