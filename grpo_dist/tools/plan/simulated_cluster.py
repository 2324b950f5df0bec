"""The workers of a simulated run: each waits for as long as the real one would compute.

On shared GPUs one role computes at a time:

    engines sample | reward models, one after another | reference | policy: update, weight sync | engines ...

A role keeps the GPUs while it has calls; then the role whose call has waited longest gets them.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np

from grpo_dist.health.bounds import Bound
from grpo_dist.runtime.concurrency import gather
from grpo_dist.runtime.load_balancer import QUEUE_DEPTH, LoadBalancer
from grpo_dist.runtime.metering import Span
from grpo_dist.tools.plan import fake_records, teachers
from grpo_dist.tools.plan.engines import Engine, generate_episode
from grpo_dist.tools.plan.rates import Rates, UpdateWork
from grpo_dist.tools.plan.reward_models import KnownRewardModel, role_of
from grpo_dist.tools.plan.scenario import Scenario
from grpo_dist.tools.plan.supervised import demonstration_rows
from grpo_dist.tools.plan.workload import Workload
from grpo_dist.types import EpochUpdate, Group, Prompt, Sampling, TrainBatch
from grpo_dist.workers import RolloutsRef, Workers

ENGINES, POLICY = "rollout", "policy"


class SimulationTrace:
    """The spans of every worker by name (`bars`), on the clock of the running loop, and the processor time
    of the simulation itself.
    """

    def __init__(self, tracks: Iterable[str]) -> None:
        self._loop = asyncio.get_running_loop()
        self.bars: dict[str, list[Span]] = {track: [] for track in tracks}
        self.excluded_s = 0.0  # processor time of the simulated workers

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Exclude the processor time of this block from the driver's."""
        begin = time.thread_time()
        try:
            yield
        finally:
            self.excluded_s += time.thread_time() - begin

    @asynccontextmanager
    async def span(self, track: str, stage: str) -> AsyncIterator[None]:
        """Record this block as a span of ``stage``."""
        begin = self._loop.time()
        try:
            yield
        finally:
            self.bars.setdefault(track, []).append(Span(stage, begin, self._loop.time()))


class SimulatedGpus:
    """``turn_s``: seconds until a role has the GPUs and its weights on them, by role; empty: each role has
    its own GPUs, and nothing waits. ``resend_s``: where engines get them back from others than the policy.
    """

    def __init__(self, trace: SimulationTrace, turn_s: Mapping[str, float], *, resend_s: float = 0.0) -> None:
        self._trace, self._turn_s, self._resend_s = trace, turn_s, resend_s
        self._holder, self._calls, self._is_changing = ENGINES, 0, False
        self._waiting: list[asyncio.Future[None]] = []

    @asynccontextmanager
    async def turn(self, role: str) -> AsyncIterator[None]:
        """Run the block with the GPUs of ``role``."""
        if role not in self._turn_s:
            yield
            return
        while role != self._holder or self._is_changing:
            if self._calls or self._is_changing:
                self._waiting.append(asyncio.get_running_loop().create_future())
                await self._waiting[-1]
            else:
                await self._change(role)
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._wake()

    async def return_to_engines(self) -> None:
        """Give the GPUs back to the engines, which have new weights. The policy calls it, between turns."""
        if self._turn_s and self._holder == POLICY:
            await self._change(ENGINES)

    async def _change(self, role: str) -> None:
        seconds = self._turn_s[role]
        if role == ENGINES and self._holder != POLICY:
            seconds = self._resend_s
        self._is_changing = True
        try:
            async with self._trace.span("policy", "turn"):
                await asyncio.sleep(seconds)
            self._holder = role
        finally:
            self._is_changing = False
            self._wake()

    def _wake(self) -> None:
        """Let all that wait look again, in the order in which they came."""
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)


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
        """Sample a group on an engine. ``tokens``: the most of a sample."""
        index = await self._admitted(len(lengths), len(lengths) * tokens)
        engine, on_sample, workload = self.engines[index], self._releasing(index, tokens), self._workload
        if workload.turns == 1:
            shared = workload.shared_tokens
            await engine.generate(prompt_tokens - shared, lengths, on_sample=on_sample, cached=shared)
            return
        share, turns, tool_s = prompt_tokens / len(lengths), workload.turns, workload.tool_s
        await gather(
            generate_episode(engine, share, n, turns=turns, tool_s=tool_s, on_sample=on_sample)
            for n in lengths
        )

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
    """All policy ranks. ``shared_tokens``: that all prompts begin with; ``demonstrations``: of an update."""

    def __init__(
        self,
        rates: Rates,
        trace: SimulationTrace,
        gpus: SimulatedGpus,
        *,
        shared_tokens: int,
        demonstrations: tuple[tuple[int, tuple[int, ...]], ...] = (),
    ) -> None:
        self._rates, self._trace, self._gpus = rates, trace, gpus
        self._shared_tokens, self._demonstrations = shared_tokens, demonstrations

    def stage(
        self,
        batches: Sequence[TrainBatch],
        *,
        keep_logprobs: bool,
        later_epochs: Sequence[Sequence[EpochUpdate]] = (),
    ) -> list[UpdateWork]:
        with self._trace.excluded():
            return [fake_records.work_of(b, self._shared_tokens, self._demonstrations) for b in batches]

    async def score_norms(self, batch: TrainBatch) -> dict[int, np.ndarray]:
        """Return zeros at once: `Rates.update_s` has the time of this pass."""
        mask = batch.loss_mask.numpy()
        return {row: np.zeros(int(own.sum()), np.float32) for row, own in enumerate(mask)}

    async def update(
        self, staged: list[UpdateWork], *, kl_coef: float, bounds: Sequence[Bound]
    ) -> dict[str, float]:
        with self._trace.excluded():
            seconds = self._rates.update_s(staged)
        await self.run("update", seconds)
        return {"loss/policy": 0.0}

    async def run(self, stage: str, seconds: float) -> None:
        """Occupy all ranks with ``stage``."""
        async with self._gpus.turn(POLICY), self._trace.span("policy", stage):
            await asyncio.sleep(seconds)


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


class SimulatedCluster:
    """Replaces `actors.cluster.Cluster` for the configuration that ``scenario`` simulates. Needs a running
    loop.
    """

    def __init__(self, scenario: Scenario) -> None:
        rates, config = scenario.rates, scenario.config
        count = config.rollout.num_workers
        trace = self.trace = SimulationTrace([*(f"rollout-{i}" for i in range(count)), "policy"])
        engines = [
            Engine(rates, scenario.capacity, meter=trace.excluded, spans=trace.bars[f"rollout-{i}"])
            for i in range(count)
        ]
        gpus = _gpus(scenario, trace)
        self.rollouts = TimedRollouts(engines, rates, scenario.workload, scenario.capacity, trace, gpus)
        rewards = TimedRewards(
            rates,
            self.rollouts,
            trace,
            gpus,
            graders=config.rewards.num_workers,
            models=[(model, scenario.reward_model_workers(model)) for model in scenario.reward_models],
            signal_share=scenario.signal_share,
        )
        turn = POLICY if scenario.reference_is_base else "reference"
        reference = TimedReference(rates, trace, gpus, turn=turn, workers=scenario.reference_workers)
        policy = TimedPolicy(
            rates,
            trace,
            gpus,
            shared_tokens=scenario.workload.shared_tokens,
            demonstrations=demonstration_rows(
                config.demonstrations, updates=config.batch.updates_per_step, longest=config.max_length
            ),
        )
        sync = TimedWeightSync(rates, self.rollouts, policy, gpus)
        # Simulated workers have only the methods that a planned run calls.
        roles: tuple[Any, ...] = (
            self.rollouts, rewards, reference if config.needs_reference else None, policy, sync,
        )  # fmt: skip
        by_name = {
            t.name: TimedReference(
                teachers.rates_of(t, rates), trace, gpus,
                turn=teachers.role_of(t), workers=scenario.teacher_workers(t), name=f"teacher-{t.name}",
            )
            for t in config.distillation.of_own_models
        }  # fmt: skip
        self.workers = replace(Workers(*roles), teachers=cast(Any, by_name))


def _gpus(scenario: Scenario, trace: SimulationTrace) -> SimulatedGpus:
    """Return the GPUs that the roles of ``scenario`` share, with the times of their turns."""
    if not scenario.sharing:
        return SimulatedGpus(trace, {})
    rates = scenario.rates
    turn_s = {ENGINES: rates.turn_s(), POLICY: rates.turn_s()}
    if "reference" in scenario.sharing:
        turn_s["reference"] = rates.reference_turn_s()
    for teacher in scenario.config.distillation.of_own_models:
        turn_s[teachers.role_of(teacher)] = teachers.rates_of(teacher, rates).reference_turn_s()
    for model in scenario.reward_models:
        turn_s[role_of(model.settings)] = rates.reward_model_turn_s(model)
    return SimulatedGpus(trace, turn_s, resend_s=rates.resend_s())
