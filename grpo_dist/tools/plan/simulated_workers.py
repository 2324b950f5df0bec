"""The workers of a simulated run, which wait instead of computing, and the recorder that watches it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grpo_dist.batch.token_values import ValuesOfSamples
from grpo_dist.config import Config
from grpo_dist.health.bounds import Bound
from grpo_dist.loop.ledger import Account
from grpo_dist.runtime.concurrency import gather
from grpo_dist.runtime.load_balancer import IN_HAND, Admission
from grpo_dist.runtime.metering import Span, Usage
from grpo_dist.tools.plan import made_records
from grpo_dist.tools.plan.engines import Engine, EngineLost
from grpo_dist.tools.plan.failures import Checkpoints, Losses, LossRates
from grpo_dist.tools.plan.rates import Rates, UpdateWork
from grpo_dist.tools.plan.reward_models import KnownRewardModel
from grpo_dist.tools.plan.stragglers import EVEN, Slow, SlowTimes
from grpo_dist.tools.plan.workload import Workload
from grpo_dist.types import Group, Prompt, Sampling, TrainBatch
from grpo_dist.workers import RolloutsRef, Workers


@dataclass(frozen=True, slots=True)
class Step:
    end: float
    tokens: int
    completion_tokens: int
    samples: int
    staleness: float


class World:
    """All workers and the recorder of one run; see `simulation.Scenario`."""

    def __init__(
        self,
        config: Config,
        rates: Rates,
        workload: Workload,
        *,
        seats: int,
        colocated: bool,
        signal_share: float = 1.0,
        loss_rates: LossRates,
        slow: Slow = EVEN,
        reward_models: Sequence[KnownRewardModel] = (),
    ) -> None:
        self._config, self._rates, self._workload, self._colocated = config, rates, workload, colocated
        self._signal_share, self._slow = signal_share, slow
        self._loop = asyncio.get_running_loop()
        count = config.rollout.num_workers
        tracks = [f"rollout-{i}" for i in range(count)] + ["policy"]
        self.bars: dict[str, list[Span]] = {track: [] for track in tracks}
        self._engines = [
            Engine(
                rates if i >= slow.engines else SlowTimes(rates, slow.engine),
                seats,
                meter=self.apart,
                spans=self.bars[f"rollout-{i}"],
            )
            for i in range(count)
        ]
        self._admission = Admission(count, IN_HAND * seats, on_wait=self._note_queue)
        self._driver = asyncio.Lock()
        self._graders = _Servers(self, "reward", config.rewards.num_workers)
        self._reward_models = [
            (m, _Servers(self, f"reward-model-{m.settings.name}", m.settings.num_workers))
            for m in reward_models
        ]
        self._references = _Servers(self, "reference", config.reference.num_workers)
        self._version, self._asked = 0, 0
        self._samples = self._tokens = self._completion_tokens = 0  # of the step that is logged next
        self.steps: list[Step] = []
        self.batch_s: list[float] = []
        self.queue = self.logged = 0  # groups that waited at most; steps, those that are taken back, too
        self.apart_s = 0.0
        self.losses = Losses(
            loss_rates,
            self._engines,
            self._admission,
            seed=config.seed,
            doing=self.doing,
            workers=self.workers,
        )
        self.checkpoints = Checkpoints()

    def workers(self) -> Workers:
        me: Any = self
        reference = me if self._config.needs_reference else None
        return Workers(me, me, reference, me, me)

    async def begin(self) -> Workers:
        return self.workers()

    @property
    def sequences(self) -> float:
        """Decoded at once by an engine, of all that were, whether they came to their end or not."""
        steps = sum(engine.steps for engine in self._engines)
        return sum(engine.tokens for engine in self._engines) / max(steps, 1.0)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Processor time within is not the driver's."""
        begin = time.thread_time()
        try:
            yield
        finally:
            self.apart_s += time.thread_time() - begin

    @asynccontextmanager
    async def doing(self, track: str, stage: str) -> AsyncIterator[None]:
        begin = self._loop.time()
        try:
            yield
        finally:
            self.bars.setdefault(track, []).append(Span(stage, begin, self._loop.time()))

    # rollouts

    async def sample(self, prompt: Prompt, *, seeds: Sequence[int], sampling: Sampling) -> RolloutsRef:
        with self.apart():
            lengths = [self._workload.length(seed) for seed in seeds]
        begin, prompt_tokens = self._loop.time(), int(prompt.token_ids[0])
        tokens = prompt_tokens + sampling.max_new_tokens
        while True:
            index = await self._admitted(len(seeds), len(seeds) * tokens)
            try:
                await self._engines[index].generate(
                    prompt_tokens, lengths, on_sample=self._releasing(index, tokens)
                )
                break
            except EngineLost:
                continue
        async with self._driver:  # one thread receives all groups
            await asyncio.sleep(len(seeds) * self._rates.reached.sample_s)
        self.batch_s.append(self._loop.time() - begin)
        with self.apart():
            return made_records.rollouts(prompt.uid, lengths, self._version)

    async def _admitted(self, sequences: int, tokens: int) -> int:
        self._asked += 1
        try:
            return await self._admission.admit(sequences, tokens)
        finally:
            self._asked -= 1

    def _note_queue(self) -> None:
        self.queue = max(self.queue, self._asked)

    def _releasing(self, index: int, tokens: int) -> Callable[[], None]:
        return lambda: self._admission.release(index, 1, tokens)

    async def abandon(self) -> None:
        """Policy ranks are lost here, and no step is rolled back."""

    # rewards and reference

    async def score(self, prompt: Prompt, rollouts: RolloutsRef) -> Group:
        """All reward models at once, and then a grader, as `actors.workers.reward.RewardPool` does."""
        if self._reward_models:
            await self._modelled(int(prompt.token_ids[0]), rollouts)
        await self._graders.serve("score", self._rates.score_s(len(rollouts)))
        with self.apart():
            number = int(prompt.uid.rpartition("/")[2])
            signal = random.Random(f"{number} {self._version}").random() < self._signal_share
            return made_records.group(prompt, rollouts, signal=signal)

    async def _modelled(self, prompt_tokens: int, rollouts: RolloutsRef) -> None:
        with self.apart():
            lengths = made_records.tokens_of(rollouts)
            calls = [
                (servers, self._rates.reward_model_s(model, prompt_tokens, lengths))
                for model, servers in self._reward_models
            ]
        await gather(servers.serve("reward_model", seconds) for servers, seconds in calls)

    async def logprobs(self, prompt: Prompt, rollouts: RolloutsRef) -> list[np.ndarray]:
        with self.apart():
            work = UpdateWork(((int(prompt.token_ids[0]), made_records.tokens_of(rollouts)),))
            seconds = self._rates.reference_s(work)
        await self._references.serve("logprobs", seconds)
        return [np.zeros(1, np.float32) for _ in rollouts]

    # policy and sync

    def stage(self, batches: Sequence[TrainBatch]) -> list[UpdateWork]:
        with self.apart():
            return [made_records.work_of(batch) for batch in batches]

    async def update(
        self, staged: list[UpdateWork], *, kl_coef: float, bounds: Sequence[Bound]
    ) -> dict[str, float]:
        with self.apart():
            seconds = self._rates.update_s(staged)
        if self._colocated:
            await self._turn()
        await self.losses.with_ranks("update", seconds * self._slow.rank)
        return {"loss/policy": 0.0}

    async def push(self, version: int) -> dict[str, float]:
        """Engines stand still. In mode ``drain`` they have nothing in hand."""
        for engine in self._engines:
            engine.pause()
        await self.losses.with_ranks("sync", self._rates.sync_s())
        if self._colocated:
            await self._turn()
        for engine in self._engines:
            engine.resume()
        self._version = version
        await asyncio.sleep(self._rates.reached.overhead_s)
        return {}

    async def _turn(self) -> None:
        async with self.doing("policy", "turn"):
            await asyncio.sleep(self._rates.turn_s())

    # recorder

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.logged += 1
        self.steps.append(
            Step(
                self._loop.time(),
                self._tokens + self._completion_tokens,
                self._completion_tokens,
                self._samples,
                metrics["rollout/staleness_mean"],
            )
        )

    def back_to(self, step: int) -> None:
        del self.steps[step:]
        self._version = step

    def spans(self, step: int, own: Sequence[Span], workers: Mapping[str, Usage]) -> None:
        """What is drawn are the bars."""

    def samples(self, name: str, groups: list[Group], values: ValuesOfSamples | None = None) -> None:
        with self.apart():
            self._samples = sum(len(g.rollouts) for g in groups)
            self._tokens = sum(int(g.prompt.token_ids[0]) * len(g.rollouts) for g in groups)
            self._completion_tokens = sum(sum(made_records.tokens_of(g.rollouts)) for g in groups)

    def account(self, step: int, found: Account) -> None:
        """No books are kept of what nobody sampled."""

    def aside(self, step: int, groups: list[Group]) -> str:
        return "nowhere"

    def warn(self, message: str) -> None:
        """Health is not what is simulated."""

    def note(self, message: str) -> None:
        """Nobody reads the events of a simulated run."""

    def flush(self) -> None:
        """Nothing is written."""

    def phase(self, name: str) -> None:
        """Nobody looks on."""

    directory = Path()  # of which nothing is made


class _Servers:
    """So many that serve one call after the other, first come, first served."""

    def __init__(self, world: World, track: str, count: int) -> None:
        self._world, self._track = world, track
        self._free = list(reversed(range(count)))
        self._room = asyncio.Semaphore(count)

    async def serve(self, stage: str, seconds: float) -> None:
        async with self._room:
            index = self._free.pop()
            try:
                async with self._world.doing(f"{self._track}-{index}", stage):
                    await asyncio.sleep(seconds)
            finally:
                self._free.append(index)
