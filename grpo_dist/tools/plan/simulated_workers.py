"""The workers of a simulated run: each waits for as long as the real one would compute."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

import numpy as np

from grpo_dist.health.bounds import Bound
from grpo_dist.runtime.concurrency import gather
from grpo_dist.runtime.load_balancer import QUEUE_DEPTH, LoadBalancer
from grpo_dist.tools.plan import fake_records
from grpo_dist.tools.plan.engines import Engine, EngineLost, generate_episode
from grpo_dist.tools.plan.failures import SimulatedFailures
from grpo_dist.tools.plan.rates import Rates, UpdateWork
from grpo_dist.tools.plan.reward_models import KnownRewardModel, role_of
from grpo_dist.tools.plan.simulated_gpus import ENGINES, POLICY, SimulatedGpus
from grpo_dist.tools.plan.trace import SimulationTrace
from grpo_dist.tools.plan.workload import Workload
from grpo_dist.types import EpochUpdate, Group, Prompt, Sampling, TrainBatch
from grpo_dist.workers import RolloutsRef


class TimedRollouts:
    """Engines behind the real load balancer. ``capacity``: sequences that an engine decodes at once."""

    def __init__(
        self,
        engines: Sequence[Engine],
        rates: Rates,
        workload: Workload,
        capacity: int,
        trace: SimulationTrace,
        gpus: SimulatedGpus,
    ) -> None:
        self._gpus = gpus
        self.engines, self._rates, self._workload, self._trace = engines, rates, workload, trace
        self._loop = asyncio.get_running_loop()
        self.load_balancer = LoadBalancer(len(engines), QUEUE_DEPTH * capacity, on_wait=self._note_queue)
        self._driver = asyncio.Lock()
        self._waiting = 0
        self.version = 0  # of the weights that the engines hold
        self.batch_s: list[float] = []
        self.longest_queue = 0  # groups that waited for an engine at once

    @property
    def sequences(self) -> float:
        """Mean number of sequences that an engine decodes at once, unfinished ones included."""
        steps = sum(engine.steps for engine in self.engines)
        return sum(engine.tokens for engine in self.engines) / max(steps, 1.0)

    async def sample(self, prompt: Prompt, *, seeds: Sequence[int], sampling: Sampling) -> RolloutsRef:
        with self._trace.excluded():
            lengths = [self._workload.length(seed, prompt.uid) for seed in seeds]
        begin, prompt_tokens = self._loop.time(), int(prompt.token_ids[0])
        tokens = prompt_tokens + sampling.max_new_tokens
        async with self._gpus.turn(ENGINES):
            await self._generate(prompt_tokens, lengths, tokens)
            async with self._driver:  # one thread receives all groups
                await asyncio.sleep(len(seeds) * self._rates.reached.sample_s)
        self.batch_s.append(self._loop.time() - begin)
        with self._trace.excluded():
            return fake_records.rollouts(prompt.uid, lengths, self.version)

    async def _generate(self, prompt_tokens: int, lengths: Sequence[int], tokens: int) -> None:
        """Sample a group on any engine, and again where that one fails. ``tokens``: the most of a sample."""
        while True:
            index = await self._admitted(len(lengths), len(lengths) * tokens)
            engine, on_sample = self.engines[index], self._releasing(index, tokens)
            try:
                if self._workload.turns == 1:
                    shared = self._workload.shared_tokens
                    own = prompt_tokens - shared
                    return await engine.generate(own, lengths, on_sample=on_sample, cached=shared)
                share, turns, tool_s = (
                    prompt_tokens / len(lengths),
                    self._workload.turns,
                    self._workload.tool_s,
                )
                await gather(
                    generate_episode(engine, share, n, turns=turns, tool_s=tool_s, on_sample=on_sample)
                    for n in lengths
                )
                return
            except EngineLost:
                continue

    async def _admitted(self, sequences: int, tokens: int) -> int:
        self._waiting += 1
        try:
            return await self.load_balancer.admit(sequences, tokens)
        finally:
            self._waiting -= 1

    def _note_queue(self) -> None:
        self.longest_queue = max(self.longest_queue, self._waiting)

    def _releasing(self, index: int, tokens: int) -> Callable[[], None]:
        return lambda: self.load_balancer.release(index, 1, tokens)

    async def abandon(self) -> None:
        """Do nothing: simulated runs lose policy ranks, but roll back no step."""


class TimedRewards:
    """Reward models score at the same time, then a grader does, as in `actors.workers.reward.RewardPool`."""

    def __init__(
        self,
        rates: Rates,
        rollouts: TimedRollouts,
        trace: SimulationTrace,
        gpus: SimulatedGpus,
        *,
        graders: int,
        models: Sequence[tuple[KnownRewardModel, int]],
        signal_share: float,
    ) -> None:
        """``models``: with the workers of each."""
        self._rates, self._rollouts, self._trace, self._gpus = rates, rollouts, trace, gpus
        self._signal_share = signal_share
        self._graders = WorkerQueue(trace, "reward", graders)
        self._models = [
            (model, WorkerQueue(trace, f"reward-model-{model.settings.name}", workers))
            for model, workers in models
        ]

    async def score(self, prompt: Prompt, rollouts: RolloutsRef) -> Group:
        if self._models:
            await self._score_by_models(int(prompt.token_ids[0]), rollouts)
        await self._graders.serve("score", self._rates.score_s(len(rollouts)))
        with self._trace.excluded():
            number = int(prompt.uid.rpartition("/")[2])
            signal = random.Random(f"{number} {self._rollouts.version}").random() < self._signal_share
            return fake_records.group(prompt, rollouts, signal=signal)

    async def _score_by_models(self, prompt_tokens: int, rollouts: RolloutsRef) -> None:
        with self._trace.excluded():
            lengths = fake_records.tokens_of(rollouts)
            calls = [
                (role_of(model.settings), workers, self._rates.reward_model_s(model, prompt_tokens, lengths))
                for model, workers in self._models
            ]

        async def score(role: str, workers: WorkerQueue, seconds: float) -> None:
            async with self._gpus.turn(role):
                await workers.serve("reward_model", seconds)

        await gather(score(*call) for call in calls)


class TimedReference:
    """The reference, or the teacher ``name``. ``turn``: in which it computes, on shared GPUs."""

    def __init__(
        self,
        rates: Rates,
        trace: SimulationTrace,
        gpus: SimulatedGpus,
        *,
        turn: str,
        workers: int,
        name: str = "reference",
    ) -> None:
        self._rates, self._trace, self._gpus, self._turn = rates, trace, gpus, turn
        self._workers = WorkerQueue(trace, name, workers)

    async def logprobs(self, prompt: Prompt, rollouts: RolloutsRef) -> list[np.ndarray]:
        with self._trace.excluded():
            work = UpdateWork(((int(prompt.token_ids[0]), fake_records.tokens_of(rollouts)),))
            seconds = self._rates.reference_s(work)
        async with self._gpus.turn(self._turn):
            await self._workers.serve("logprobs", seconds)
        return [np.zeros(1, np.float32) for _ in rollouts]


class TimedPolicy:
    """All policy ranks. ``slowdown``: how many times as long the slowest takes; the others wait for it.
    ``shared_tokens``: that all prompts begin with; ``shown``: demonstrations of an update.
    """

    def __init__(
        self,
        rates: Rates,
        failures: SimulatedFailures,
        trace: SimulationTrace,
        gpus: SimulatedGpus,
        *,
        slowdown: float,
        shared_tokens: int,
        shown: tuple[tuple[int, tuple[int, ...]], ...] = (),
    ) -> None:
        self._rates, self._failures, self._trace = rates, failures, trace
        self._gpus, self._slowdown = gpus, slowdown
        self._shared_tokens, self._shown = shared_tokens, shown

    def stage(
        self,
        batches: Sequence[TrainBatch],
        *,
        keep_logprobs: bool,
        later_epochs: Sequence[Sequence[EpochUpdate]] = (),
    ) -> list[UpdateWork]:
        with self._trace.excluded():
            return [fake_records.work_of(batch, self._shared_tokens, self._shown) for batch in batches]

    async def score_norms(self, batch: TrainBatch) -> dict[int, np.ndarray]:
        """Return zeros at once: `Rates.update_s` has the time of this pass."""
        mask = batch.loss_mask.numpy()
        return {row: np.zeros(int(own.sum()), np.float32) for row, own in enumerate(mask)}

    async def update(
        self, staged: list[UpdateWork], *, kl_coef: float, bounds: Sequence[Bound]
    ) -> dict[str, float]:
        with self._trace.excluded():
            seconds = self._rates.update_s(staged)
        await self.run("update", seconds * self._slowdown)
        return {"loss/policy": 0.0}

    async def run(self, stage: str, seconds: float) -> None:
        """Occupy all ranks with ``stage``. Raises StateLost where one of them fails."""
        async with self._gpus.turn(POLICY):
            await self._failures.run_ranks(stage, seconds)


class TimedWeightSync:
    def __init__(
        self, rates: Rates, rollouts: TimedRollouts, policy: TimedPolicy, gpus: SimulatedGpus
    ) -> None:
        self._rates, self._rollouts, self._policy, self._gpus = rates, rollouts, policy, gpus

    async def push(self, version: int) -> dict[str, float]:
        """Pause all engines until they hold the new weights. In mode ``drain`` they have no requests."""
        for engine in self._rollouts.engines:
            engine.pause()
        await self._policy.run("sync", self._rates.sync_s())
        await self._gpus.return_to_engines()
        for engine in self._rollouts.engines:
            engine.resume()
        self._rollouts.version = version
        await asyncio.sleep(self._rates.reached.overhead_s)
        return {}


class WorkerQueue:
    """``count`` workers, each with one call at a time, which take calls in the order of their arrival."""

    def __init__(self, trace: SimulationTrace, track: str, count: int) -> None:
        self._trace, self._track = trace, track
        self._free = list(reversed(range(count)))
        self._available = asyncio.Semaphore(count)

    async def serve(self, stage: str, seconds: float) -> None:
        async with self._available:
            index = self._free.pop()
            try:
                async with self._trace.span(f"{self._track}-{index}", stage):
                    await asyncio.sleep(seconds)
            finally:
                self._free.append(index)
