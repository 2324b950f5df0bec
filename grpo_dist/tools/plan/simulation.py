"""Runs the real driver loop on simulated workers and a simulated clock.

    driver.run, pipeline, load balancer, health    as in production
    staging                                        in production's order, with lengths instead of rows
    workers                                        wait for the time given by `Rates`

Colocated roles compute one at a time:

    engines sample | reward models, one after another | reference | policy: update, weight sync | engines ...

A role keeps the GPUs while it has calls; then the role with the longest waiting call gets them.

Records are fake: they have lengths but no tokens, so that the samples of a thousand GPUs fit a small machine.
Does not import torch.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, cast

import numpy as np

from grpo_dist import driver
from grpo_dist.batch.signal import trains_all_rows
from grpo_dist.batch.token_values import ValuesOfSamples
from grpo_dist.config import Config, HealthConfig
from grpo_dist.config.algorithm import NormalisedAdvantage
from grpo_dist.config.data import EpochsOrderConfig, LengthOrderConfig
from grpo_dist.config.distillation import SampledKL
from grpo_dist.data.order import OrderState
from grpo_dist.evaluation.sampling import EvalSet, evaluate
from grpo_dist.health import Bound
from grpo_dist.loop.first_come import PIPELINES
from grpo_dist.loop.groups import ScoredBatch, ScoredGroup
from grpo_dist.loop.pipeline import Pipeline
from grpo_dist.loop.progress import PipelineState, Progress
from grpo_dist.loop.staging import Staged, Staging
from grpo_dist.runtime.concurrency import gather
from grpo_dist.runtime.load_balancer import QUEUE_DEPTH, LoadBalancer
from grpo_dist.runtime.metering import Span
from grpo_dist.runtime.recorder import Recorder
from grpo_dist.runtime.seeds import request_seeds
from grpo_dist.tools.bench.figures import covered_s
from grpo_dist.tools.bench.record import NoCheckpoints
from grpo_dist.tools.plan.engines import Engine
from grpo_dist.tools.plan.models import FrozenModel
from grpo_dist.tools.plan.rates import Rates, UpdateWork
from grpo_dist.tools.plan.virtual_clock import run_virtually
from grpo_dist.tools.plan.workload import Workload
from grpo_dist.types import Group, Prompt, Rollout, Sampling, TeacherLogprobs, has_signal
from grpo_dist.workers import RolloutsRef, Workers

Bars = dict[str, list[Span]]  # by worker, on the running loop's clock
ENGINES, POLICY = "rollout", "policy"
_FOREVER_S = 1e9  # deadlines of a simulated run; the report compares its times with the configured ones
_REWARD = "planned"  # the reward of fake groups
_STAGES = ("sample", "reward_model", "score", "logprobs", "update", "sync", "turn")
# Mean tokens of a demonstration's prompt and completion, relative to `max_length`, if no rows are known.
_PROMPT_SHARE, _COMPLETION_SHARE = 1 / 8, 3 / 8


@dataclass(frozen=True, slots=True)
class Scenario:
    """One simulated run.

    ``capacity``: concurrent sequences per engine. ``sharing``: the roles colocated on the policy's GPUs, see
    `Roles`. ``reference_is_base``: the policy ranks compute the reference. ``signal_share``: share of groups
    with nonzero variance. ``frozen``: teachers and reward models of known sizes. ``epoch_steps``: an epoch
    has at least the prompts of this many steps. ``parts``: number of equal parts of the cluster, of which one
    is simulated, see `as_part`.
    """

    config: Config
    rates: Rates
    workload: Workload
    capacity: int
    sharing: frozenset[str] = frozenset()
    reference_is_base: bool = False
    signal_share: float = 1.0
    frozen: tuple[FrozenModel, ...] = ()
    warmup_steps: int = 1
    steps: int = 4
    epoch_steps: int = 1
    parts: int = 1

    def as_part(self, prompts: int) -> Scenario:
        """Return a part of a large cluster: a share of the engines, graders and reference workers, with that
        share of a step's prompts, at least ``prompts``. The driver and the updates keep the work of all
        parts. Returns the scenario itself if its numbers cannot be divided.
        """
        config = self.config
        batch, rollout, rewards = config.batch, config.rollout, config.rewards
        counts = [batch.prompts_per_step // batch.updates_per_step, rollout.num_workers, rewards.num_workers]
        if config.needs_reference and not self.reference_is_base:
            counts.append(config.reference.num_workers)
        parts = math.gcd(*counts)
        while batch.prompts_per_step // parts < prompts and parts > 1:
            parts = next(n for n in range(parts - 1, 0, -1) if parts % n == 0)
        if parts == 1 or self.sharing or self.frozen or config.dynamic_sampling.enabled:
            return self
        shares = {"batch": "prompts_per_step", "rollout": "num_workers", "rewards": "num_workers"}
        if config.needs_reference and not self.reference_is_base:
            shares["reference"] = "num_workers"
        sections = {
            name: getattr(config, name).model_copy(update={key: getattr(getattr(config, name), key) // parts})
            for name, key in shares.items()
        }
        reached = replace(self.rates.reached, sample_s=parts * self.rates.reached.sample_s)
        rates = replace(self.rates, reached=reached)
        return replace(self, config=config.model_copy(update=sections), rates=rates, parts=parts)

    @property
    def scorers(self) -> tuple[FrozenModel, ...]:
        """All models that score samples, including the reference if the run needs one."""
        reference = (FrozenModel(self.rates.model),) if self.config.needs_reference else ()
        return reference + self.frozen

    def workers_of(self, model: FrozenModel) -> int:
        """Return the number of workers of ``model``, one of `scorers`."""
        if model.role in self.sharing or self.turn_of(model) == POLICY:
            return self.config.policy.num_workers
        return (model.settings or self.config.reference).num_workers

    def turn_of(self, model: FrozenModel) -> str:
        """Return the role that ``model`` belongs to on shared GPUs."""
        return POLICY if model.settings is None and self.reference_is_base else model.role

    def demonstrations(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Return one update's demonstrations: tokens of each prompt and completion."""
        settings, updates = self.config.demonstrations, self.config.batch.updates_per_step
        if settings is None:
            return ()
        prompt, completion = assumed_row(self.config.max_length)
        return ((prompt, (completion,)),) * (settings.rows_per_step // updates)


def assumed_row(longest: int) -> tuple[int, int]:
    """Return the assumed prompt and completion tokens of a demonstration of unknown length. ``longest``:
    tokens of the run's longest sequence.
    """
    return round(_PROMPT_SHARE * longest), max(1, round(_COMPLETION_SHARE * longest))


@dataclass(frozen=True)
class Simulated:
    """Means per step over the timed steps.

    ``stage_s``: seconds in which at least one worker is in a stage. ``idle``: idle time share of engines and
    policy. ``tokens``: of prompts and completions, including samples that dynamic sampling discards.
    ``length_bias``: after the last step, NaN without `batch.order` completion. ``sequences``: concurrent
    sequences of a busy engine. ``bars``: the spans of each worker since the start.
    """

    step_s: float
    stage_s: dict[str, float]
    idle: dict[str, float]
    tokens: float
    completion_tokens: float
    samples: float
    sequences: float
    longest_batch_s: float
    longest_update_s: float
    staleness: float
    length_bias: float
    bars: dict[str, list[Span]]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s

    @property
    def completion_tokens_per_s(self) -> float:
        return self.completion_tokens / self.step_s


def simulate(scenario: Scenario) -> Simulated:
    """Run a few steps of the loop, as a benchmark does."""
    config = as_planned(scenario)
    cluster, recorder = run_virtually(lambda: _run(scenario, config))
    first = scenario.warmup_steps + config.max_staleness
    steps = recorder.steps[first : first + scenario.steps]
    bars, rollouts = cluster.bars, cluster.rollouts
    begin, end = recorder.steps[first - 1].end if first else 0.0, steps[-1].end
    seconds, count = end - begin, len(steps)

    busy = {
        stage: covered_s((s for spans in bars.values() for s in spans if s.stage == stage), begin, end)
        for stage in _STAGES
    }

    engines = [name for name in bars if name.startswith("rollout")]
    sampling = [covered_s((s for s in bars[name] if s.stage == "sample"), begin, end) for name in engines]
    policy = [s for s in bars["policy"] if s.stage in ("update", "sync")]
    return Simulated(
        step_s=seconds / count,
        stage_s={stage: occupied / count for stage, occupied in busy.items() if occupied},
        idle={
            "rollout": 1.0 - sum(sampling) / len(engines) / seconds,
            "policy": 1.0 - covered_s(policy, begin, end) / seconds,
        },
        tokens=scenario.parts * sum(s.tokens for s in steps) / count,
        completion_tokens=scenario.parts * sum(s.completion_tokens for s in steps) / count,
        samples=scenario.parts * sum(s.samples for s in steps) / count,
        sequences=rollouts.sequences,
        longest_batch_s=max(rollouts.batch_s),
        longest_update_s=max(s.end - s.begin for s in bars["policy"] if s.stage == "update"),
        staleness=sum(s.staleness for s in steps) / count,
        length_bias=steps[-1].length_bias,
        bars=bars,
    )


def evaluation_s(scenario: Scenario, sizes: Sequence[int]) -> float:
    """Return the seconds of the real evaluation on otherwise idle simulated workers.

    ``sizes``: prompts of each set; sets are evaluated one after the other.
    """
    config, tokens = as_planned(scenario), scenario.workload.prompt_tokens
    sets = [EvalSet(str(i), _prompts(size, tokens)) for i, size in enumerate(sizes)]

    async def session() -> float:
        cluster = SimulatedCluster(scenario)
        await evaluate(config, cluster.workers, sets, StepRecorder(), step=0)
        return asyncio.get_running_loop().time()

    return run_virtually(session)


async def _run(scenario: Scenario, config: Config) -> tuple[SimulatedCluster, StepRecorder]:
    """Run the loop to its last step."""
    cluster, recorder = SimulatedCluster(scenario), StepRecorder()
    # Enough prompts for all in-flight groups: dynamic sampling discards prompts, and slow groups keep theirs.
    spare = config.dynamic_sampling.enabled or config.batch.order.name == "completion"
    batches = max(4 * (config.max_staleness + 1) if spare else 1, scenario.epoch_steps)
    progress, by_length = None, isinstance(config.data.order, LengthOrderConfig)
    if isinstance(config.data.order, LengthOrderConfig):
        batches = max(batches, config.data.order.window)
    prompts = _prompts(batches * config.batch.prompts_per_step, scenario.workload.prompt_tokens)
    if by_length:  # lengths are known from an earlier epoch
        lengths = scenario.workload.known_lengths([p.uid for p in prompts], config.batch.samples_per_prompt)
        progress = Progress(pipeline=PipelineState(order=OrderState(lengths=lengths)))
    workers = cluster.workers
    await driver.run(
        config, workers, prompts, [], recorder, NoCheckpoints(), progress,
        pipelines={**PIPELINES, "launched": PlannedPipeline}, make_staging=StagedLengths,
    )  # fmt: skip
    return cluster, recorder


def as_planned(scenario: Scenario) -> Config:
    """Return the configuration of ``scenario`` with steps only: no evaluation, checkpoint, deadline, health.

    Adds further steps, because the last steps of a run that samples ahead sample nothing.
    """
    config = scenario.config

    def section(name: str, **changes: Any) -> dict[str, Any]:
        part = getattr(config, name)
        assert changes.keys() <= type(part).model_fields.keys(), (name, changes)  # pydantic accepts any key
        return {name: part.model_copy(update=changes)}

    timeouts = config.cluster.timeouts
    forever = timeouts.model_copy(update=dict.fromkeys(type(timeouts).model_fields, _FOREVER_S))
    # Fake records have no sources: each teacher scores all records, for sampled tokens only, because top-k
    # tokens of several teachers cannot be joined, and source weights are not used.
    distillation = config.distillation
    kl = SampledKL() if distillation.top_k else distillation.kl
    teachers = tuple(t.model_copy(update={"sources": ()}) for t in distillation.teachers)
    order = config.data.order if isinstance(config.data.order, LengthOrderConfig) else EpochsOrderConfig()
    plain = dict.fromkeys(("weight", "temperature", "algorithm"))
    sources = tuple(source.model_copy(update=plain) for source in config.data.train)
    parts = {
        "steps": scenario.warmup_steps + scenario.steps + 2 * config.max_staleness,
        "health": HealthConfig(min_signal_groups=0),
        "demonstrations": None,
        **section("cluster", timeouts=forever),
        **section("evaluation", before=False, after=False, every=0),
        **section("checkpoint", every=0, export=False),
        **section("reference", refresh_every=0),
        **section("rewards", models=(), shuffle=False),
        **section("distillation", teachers=teachers, kl=kl),
        **section("data", order=order, train=sources),
        **section("tracking", samples=False),
    }
    if config.dynamic_sampling.enabled:  # half of a nonzero-variance group is correct
        parts |= section("dynamic_sampling", metric=_REWARD, mean_low=None, mean_high=None)
    if not config.algorithm.advantage.traits.reads_greedy_answer:  # adds a greedy answer per prompt
        # Fake rewards have one part and no steps; the estimator takes no time anyway.
        parts |= section("algorithm", advantage=NormalisedAdvantage())
    return config.model_copy(update=parts)


# Fake records


class FakeRollout(Rollout):
    """A rollout with only the fields that the loop reads: number ``sample`` of its group, with ``num_tokens``
    tokens.
    """

    __slots__ = ("num_tokens",)
    num_tokens: int
    finish_reason = "stop"  # a class attribute: a plan creates a hundred thousand rollouts
    further_rows, turns = (), ()
    temperature = max_new_tokens = None

    def __init__(self, sample: int, num_tokens: int) -> None:
        object.__setattr__(self, "sample", sample)
        object.__setattr__(self, "num_tokens", num_tokens)

    @property
    def num_sampled(self) -> int:
        return self.num_tokens


@lru_cache(maxsize=1 << 14)
def _fake_rollouts(lengths: tuple[int, ...]) -> tuple[FakeRollout, ...]:
    """Return a group's samples, cached for all compared splits."""
    return tuple(FakeRollout(i, length) for i, length in enumerate(lengths))


class FakeRollouts(tuple[FakeRollout, ...]):
    """A group's samples. ``lengths``: tokens per sample. ``version``: weight version of the sampling."""

    lengths: tuple[int, ...]
    version: int

    @classmethod
    def from_lengths(cls, lengths: tuple[int, ...], version: int) -> FakeRollouts:
        rollouts = cls(_fake_rollouts(lengths))
        rollouts.lengths, rollouts.version = lengths, version
        return rollouts


# All compared splits use the same samples.
@lru_cache(maxsize=1 << 14)
def _seeds(run_seed: int, batch: int, uid: str, samples: int) -> tuple[int, ...]:
    return tuple(request_seeds(run_seed, batch, uid, range(samples)))


@lru_cache(maxsize=1 << 14)
def _sample_lengths(workload: Workload, uid: str, seeds: tuple[int, ...]) -> tuple[int, ...]:
    return workload.sample(uid, seeds)


def _prompts(count: int, tokens: int) -> list[Prompt]:
    ids = np.array([tokens], np.int32)  # one token; its value is the prompt's length
    return [Prompt(f"planned/{i}", ids, "", "planned") for i in range(count)]


def _prompt_tokens(prompt: Prompt) -> int:
    return int(prompt.token_ids[0])


class PlannedPipeline(Pipeline):
    """`Pipeline` without asyncio tasks per group, which cost a third of a millisecond each. Used if all
    groups take the same path: an engine, the driver, then a grader and the reference at once.
    """

    def __init__(self, config: Config, workers: Workers, *others: Any) -> None:
        super().__init__(config, workers, *others)
        self._workers, self._kl = cast(Any, workers), config.has_kl_term
        self._seed, self._samples = config.seed, config.batch.samples_per_prompt
        self._admitting = asyncio.Lock()  # admits batches sequentially
        self._is_direct = self._workers.rollouts.is_direct and not (
            config.distillation.teachers
            or config.dynamic_sampling.enabled
            or config.algorithm.advantage.traits.reads_greedy_answer
        )

    async def _batch(self, batch: int) -> ScoredBatch:
        if not self._is_direct:
            return await super()._batch(batch)
        sampling, workers = self._sampling[batch], self._workers
        prompts = [self._prompts[self._order.prompt(index)] for index in self._order_indices[batch]]
        groups: list[Group | None] = [None] * len(prompts)
        loop, left, most = asyncio.get_running_loop(), len(prompts), sampling.max_new_tokens
        asked_s = latest_s = loop.time()
        finished: asyncio.Future[None] = loop.create_future()

        def score(index: int, rollouts: FakeRollouts, received_s: float) -> None:
            nonlocal left, latest_s
            groups[index], end = workers.rewards.reserve(prompts[index], rollouts, received_s)
            if self._kl and workers.reference is not None:
                end = max(end, workers.reference.reserve(prompts[index], rollouts, received_s))
            left, latest_s = left - 1, max(latest_s, end)
            if not left:
                loop.call_at(latest_s, finish)

        def finish() -> None:
            if not finished.done():
                finished.set_result(None)

        async with self._admitting:
            for index, prompt in enumerate(prompts):
                seeds = _seeds(self._seed, batch, prompt.uid, self._samples)
                lengths = workers.rollouts.lengths(prompt, seeds)
                on_end = partial(score, index)
                await workers.rollouts.begin(prompt, lengths, most, on_end, asked_s=asked_s)
        await finished
        return ScoredBatch([ScoredGroup(cast(Group, group), []) for group in groups])


class StagedLengths(Staging):
    """Stages the lengths of trained rows, in the order of `Staging`."""

    def _stage(self, step: int, batch: ScoredBatch, kl_coef: float, score_norms: Any = None) -> Staged:
        config, groups = self._config, batch.groups
        is_taught = bool(config.distillation.teachers) and config.distillation.kl_as != "advantage"
        keeps_all = is_taught or trains_all_rows(config.algorithm, has_kl_term=config.has_kl_term)
        learning = [_learning(group) for group in groups]
        updates, size = [], len(groups) // config.batch.updates_per_step
        for i in range(0, len(groups), size):
            kept = learning[i : i + size]
            if keeps_all or not any(rows.any() for rows in kept):  # else no metrics
                kept = [np.ones(len(rows), bool) for rows in kept]
            rows = [
                (_prompt_tokens(group.prompt), tuple(np.array(_lengths(group.rollouts))[own].tolist()))
                for group, own in zip(groups[i : i + size], kept, strict=True)
                if own.any()
            ]
            updates.append(UpdateWork(tuple(rows)))
        count = sum(len(lengths) for work in updates for _, lengths in work.rows)
        tokens = sum(
            prompt * len(lengths) + sum(lengths) for work in updates for prompt, lengths in work.rows
        )
        behind = [step - group.rollouts.version for group in batch.sampled]  # type: ignore[attr-defined]
        return Staged(
            updates=self._policy.stage(cast(Any, updates), keep_logprobs=False),
            rows=count,
            tokens=tokens,
            needed_tokens=float(tokens),
            loss_tokens=tokens,
            groups_with_signal=frozenset(i for i, own in enumerate(learning) if is_taught or own.any()),
            source=batch,
            kl_coef=self._inside(kl_coef),
            values=None,
            tokens_recorded=False,
            rewards=self.rewards,
            demonstrations=[],
            metrics={
                "rollout/staleness_mean": sum(behind) / len(behind),
                "rollout/staleness_max": float(max(behind)),
            },
        )


def _learning(group: Group) -> np.ndarray:
    """Return whether each sample of ``group`` has a nonzero advantage, bool [G]."""
    if group.baseline_reward is not None:
        return np.asarray(group.rewards != group.baseline_reward)
    return np.full(len(group.rewards), has_signal(group.rewards))


def _lengths(rollouts: RolloutsRef) -> tuple[int, ...]:
    lengths: tuple[int, ...] = rollouts.lengths
    return lengths


# Workers


async def _sleep_until(end: float) -> None:
    await asyncio.sleep(end - asyncio.get_running_loop().time())


async def _occupy(spans: list[Span], stage: str, seconds: float) -> None:
    """Wait, and record the time as a span of ``stage``."""
    begin = asyncio.get_running_loop().time()
    await asyncio.sleep(seconds)
    spans.append(Span(stage, begin, asyncio.get_running_loop().time()))


class Servers:
    """``count`` workers with one call at a time. Calls take the first free worker in order of arrival, so a
    call's end is known on arrival. ``bars``: receives each worker's spans, under ``track`` and its number.
    """

    def __init__(self, count: int, bars: Bars | None = None, track: str = "") -> None:
        self._loop, self._bars, self._track = asyncio.get_running_loop(), bars, track
        self._free = [(0.0, index) for index in range(count)]  # a heap of (free since, index)

    def reserve(self, stage: str, seconds: float, at: float | None = None) -> float:
        """Return the end of a call of ``seconds`` that arrives at ``at`` (None: now), no earlier than the
        previous call.
        """
        since, index = self._free[0]
        begin = max(since, self._loop.time() if at is None else at)
        heapq.heapreplace(self._free, (begin + seconds, index))
        if self._bars is not None:
            spans = self._bars.setdefault(f"{self._track}-{index}", [])
            spans.append(Span(stage, begin, begin + seconds))
        return begin + seconds


class SimulatedGpus:
    """Shared GPUs of colocated roles. ``spans``: the policy's. ``turn_s``: seconds by role until it has the
    GPUs and its weights on them; empty: roles have separate GPUs and never wait. ``resend_s``: seconds to
    resend weights if engines get the GPUs back from a role other than the policy.
    """

    def __init__(self, spans: list[Span], turn_s: Mapping[str, float], *, resend_s: float = 0.0) -> None:
        self._spans, self._turn_s, self._resend_s = spans, turn_s, resend_s
        self._holder, self._calls, self._is_changing = ENGINES, 0, False
        self._waiting: list[asyncio.Future[None]] = []

    @asynccontextmanager
    async def turn(self, role: str) -> AsyncIterator[None]:
        """Run the block while ``role`` has the GPUs."""
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
        """Give the GPUs back to the engines with new weights. Called by the policy."""
        if self._turn_s and self._holder == POLICY:
            await self._change(ENGINES)

    async def _change(self, role: str) -> None:
        seconds = self._turn_s[role]
        if role == ENGINES and self._holder != POLICY:
            seconds = self._resend_s
        self._is_changing = True
        try:
            await _occupy(self._spans, "turn", seconds)
            self._holder = role
        finally:
            self._is_changing = False
            self._wake()

    def _wake(self) -> None:
        """Wake all waiting calls in order of arrival."""
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)


class TimedRollouts:
    """Engines behind the real load balancer."""

    def __init__(self, engines: Sequence[Engine], scenario: Scenario, gpus: SimulatedGpus) -> None:
        self.engines, self._gpus, self._workload = engines, gpus, scenario.workload
        self._sample_s = scenario.rates.reached.sample_s
        self._loop = asyncio.get_running_loop()
        self.load_balancer = LoadBalancer(len(engines), QUEUE_DEPTH * scenario.capacity)
        for engine in engines:
            engine.is_watched = self._has_waiting
        self._advanced_s = 0.0
        self._driver = Servers(1)  # one thread receives all groups
        self.is_direct = not scenario.sharing and not scenario.frozen
        self.version = 0  # the engines' weight version
        self.batch_s: list[float] = []

    @property
    def sequences(self) -> float:
        """Mean concurrent sequences of an engine, including unfinished ones."""
        steps = sum(engine.steps for engine in self.engines)
        return sum(engine.tokens for engine in self.engines) / max(steps, 1.0)

    async def sample(self, prompt: Prompt, *, seeds: Sequence[int], sampling: Sampling) -> RolloutsRef:
        asked_s, finished = self._loop.time(), self._loop.create_future()

        def on_end(rollouts: FakeRollouts, received_s: float) -> None:
            if not finished.done():
                finished.set_result((rollouts, received_s))

        async with self._gpus.turn(ENGINES):
            lengths = self.lengths(prompt, seeds)
            await self.begin(prompt, lengths, sampling.max_new_tokens, on_end, asked_s=asked_s)
            rollouts, received_s = await finished
            await _sleep_until(received_s)
        return cast(RolloutsRef, rollouts)

    def lengths(self, prompt: Prompt, seeds: Sequence[int]) -> tuple[int, ...]:
        return _sample_lengths(self._workload, prompt.uid, tuple(seeds))

    async def begin(
        self,
        prompt: Prompt,
        lengths: tuple[int, ...],
        most: int,
        on_end: Callable[[FakeRollouts, float], None],
        *,
        asked_s: float,
    ) -> None:
        """Start a group requested at ``asked_s`` on an engine. ``most``: maximum tokens per sample. Calls
        ``on_end`` at its end, with the time at which the driver will receive it.
        """
        prompt_tokens, workload = _prompt_tokens(prompt), self._workload
        most += prompt_tokens
        index = await self._admit(len(lengths), most)

        def on_sample() -> None:
            self.load_balancer.release(index, 1, most)

        def sampled() -> None:
            received_s = self._driver.reserve("", len(lengths) * self._sample_s)
            self.batch_s.append(received_s - asked_s)
            on_end(FakeRollouts.from_lengths(lengths, self.version), received_s)

        new, shared = prompt_tokens - workload.shared_tokens, workload.shared_tokens
        self.engines[index].begin(
            new, lengths, on_sample, sampled, cached=shared, turns=workload.turns, tool_s=workload.tool_s
        )

    async def _admit(self, samples: int, most: int) -> int:
        """Return the engine that takes a group with at most ``most`` tokens per sample."""
        if self._advanced_s != (now := self._loop.time()):  # update loads by samples that ended since
            self._advanced_s = now
            for engine in self.engines:
                engine.advance()
        if not self.load_balancer.waiting:
            self._loop.call_soon(self._watch)  # after this group may wait
        return await self.load_balancer.admit(samples, samples * most)

    def _has_waiting(self) -> bool:
        return self.load_balancer.waiting

    def _watch(self) -> None:
        """Make engines report each sample's end while a group waits for a slot."""
        if self.load_balancer.waiting:
            for engine in self.engines:
                engine.advance()
                engine.replan()


class TimedScorer:
    """The workers of ``model``: the reference, a teacher or a reward model."""

    def __init__(self, model: FrozenModel, scenario: Scenario, bars: Bars, gpus: SimulatedGpus) -> None:
        self.model, self._rates, self._gpus = model, scenario.rates, gpus
        self._turn = scenario.turn_of(model)
        self._stage = "reward_model" if model.is_reward_model else "logprobs"
        self._workers = Servers(scenario.workers_of(model), bars, model.role.replace(" ", "-"))

    def reserve(self, prompt: Prompt, rollouts: RolloutsRef, at: float | None = None) -> float:
        """Return when a worker on separate GPUs will have scored the group that arrives at ``at``."""
        seconds = self._rates.scoring_s(self.model, _prompt_tokens(prompt), _lengths(rollouts))
        return self._workers.reserve(self._stage, seconds, at)

    async def score(self, prompt: Prompt, rollouts: RolloutsRef) -> None:
        async with self._gpus.turn(self._turn):
            await _sleep_until(self.reserve(prompt, rollouts))

    async def logprobs(self, prompt: Prompt, rollouts: RolloutsRef, top_k: int = 0) -> list[TeacherLogprobs]:
        await self.score(prompt, rollouts)
        return [TeacherLogprobs(np.zeros(1, np.float32)) for _ in rollouts]


class TimedRewards:
    """Reward models score at the same time, then a grader does, as in `actors.workers.reward.RewardPool`."""

    def __init__(
        self, models: Sequence[TimedScorer], scenario: Scenario, rollouts: TimedRollouts, bars: Bars
    ) -> None:
        self._models, self._rollouts, self._score_s = models, rollouts, scenario.rates.score_s
        self._signal_share = scenario.signal_share
        self._graders = Servers(scenario.config.rewards.num_workers, bars, "reward")

    async def score(self, prompt: Prompt, rollouts: RolloutsRef) -> Group:
        if self._models:
            await gather(model.score(prompt, rollouts) for model in self._models)
        group, end = self.reserve(prompt, rollouts)
        await _sleep_until(end)
        return group

    def reserve(self, prompt: Prompt, rollouts: RolloutsRef, at: float | None = None) -> tuple[Group, float]:
        """Return the group that arrives at ``at``, and when a grader will have scored it."""
        number, share = int(prompt.uid.rpartition("/")[2]), self._signal_share
        signal = share == 1.0 or random.Random(f"{number} {self._rollouts.version}").random() < share
        rewards = _rewards(len(rollouts), signal)
        group = Group(prompt, rollouts, rewards, {_REWARD: rewards}, ("correct",) * len(rollouts))
        return group, self._graders.reserve("score", self._score_s(len(rollouts)), at)


@lru_cache
def _rewards(samples: int, signal: bool) -> np.ndarray:
    """Return rewards [G]: every other sample is correct; in a zero-variance group all are."""
    return ((np.arange(samples) % 2) | (not signal)).astype(np.float32)


class TimedPolicy:
    """All policy ranks."""

    def __init__(self, scenario: Scenario, spans: list[Span], gpus: SimulatedGpus) -> None:
        self._rates, self._spans, self._gpus = scenario.rates, spans, gpus
        self._shared_tokens = scenario.workload.shared_tokens
        self._demonstrations, self._parts = scenario.demonstrations(), scenario.parts

    def stage(self, updates: Sequence[UpdateWork], *, keep_logprobs: bool) -> list[UpdateWork]:
        return [
            UpdateWork(work.groups * self._parts, self._shared_tokens, self._demonstrations)
            for work in updates
        ]

    async def update(
        self, staged: list[UpdateWork], *, kl_coef: float, bounds: Sequence[Bound]
    ) -> dict[str, float]:
        await self.run("update", self._rates.update_s(staged))
        return {"loss/policy": 0.0}

    async def run(self, stage: str, seconds: float) -> None:
        """Occupy all ranks with ``stage``."""
        async with self._gpus.turn(POLICY):
            await _occupy(self._spans, stage, seconds)


class TimedWeightSync:
    def __init__(
        self, rates: Rates, rollouts: TimedRollouts, policy: TimedPolicy, gpus: SimulatedGpus
    ) -> None:
        self._rates, self._rollouts, self._policy, self._gpus = rates, rollouts, policy, gpus

    async def push(self, version: int) -> dict[str, float]:
        """Pause all engines until they have the new weights. In mode ``drain`` they have no requests."""
        for engine in self._rollouts.engines:
            engine.pause()
        await self._policy.run("sync", self._rates.sync_s())
        await self._gpus.return_to_engines()
        for engine in self._rollouts.engines:
            engine.resume()
        self._rollouts.version = version
        await asyncio.sleep(self._rates.reached.overhead_s)
        return {}


class SimulatedCluster:
    """Replaces `actors.cluster.Cluster` for the configuration that ``scenario`` simulates. Needs a running
    loop.
    """

    def __init__(self, scenario: Scenario) -> None:
        rates, engines = scenario.rates, [f"rollout-{i}" for i in range(scenario.config.rollout.num_workers)]
        bars = self.bars = Bars({name: [] for name in (*engines, "policy")})
        gpus = SimulatedGpus(bars["policy"], {})
        if scenario.sharing:
            turn_s = {ENGINES: rates.turn_s(), POLICY: rates.turn_s()}
            turn_s |= {model.role: rates.scoring_turn_s(model) for model in scenario.scorers}
            gpus = SimulatedGpus(bars["policy"], turn_s, resend_s=rates.resend_s())
        simulated = [Engine(rates, scenario.capacity, spans=bars[name]) for name in engines]
        self.rollouts = TimedRollouts(simulated, scenario, gpus)
        scorers = [TimedScorer(model, scenario, bars, gpus) for model in scenario.scorers]
        reward_models = [scorer for scorer in scorers if scorer.model.is_reward_model]
        by_name = {scorer.model.role: scorer for scorer in scorers if not scorer.model.is_reward_model}
        reference = by_name.pop("reference", None)
        teachers = {role.removeprefix("teacher "): scorer for role, scorer in by_name.items()}
        policy = TimedPolicy(scenario, bars["policy"], gpus)
        # Simulated workers implement only the methods that a planned run calls.
        roles: tuple[Any, ...] = (
            self.rollouts,
            TimedRewards(reward_models, scenario, self.rollouts, bars),
            reference,
            policy,
            TimedWeightSync(rates, self.rollouts, policy, gpus),
        )
        self.workers = replace(Workers(*roles), teachers=cast(Any, teachers))


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """``end``: seconds since the run began. ``tokens``: of prompts and completions."""

    end: float
    tokens: int
    completion_tokens: int
    samples: int
    staleness: float
    length_bias: float  # NaN without `batch.order` completion


class StepRecorder(Recorder):
    """The recorder of a simulated run: keeps the time and tokens of each step."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._samples = self._tokens = self._completion_tokens = 0  # of the next logged step
        self.steps: list[SimulatedStep] = []

    def samples(self, name: str, groups: list[Group], values: ValuesOfSamples | None = None) -> None:
        self._samples = sum(len(g.rollouts) for g in groups)
        self._completion_tokens = sum(sum(_lengths(g.rollouts)) for g in groups)
        prompts = sum(_prompt_tokens(g.prompt) * len(g.rollouts) for g in groups)
        self._tokens = prompts + self._completion_tokens

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.steps.append(
            SimulatedStep(
                self._loop.time(),
                self._tokens,
                self._completion_tokens,
                self._samples,
                metrics["rollout/staleness_mean"],
                metrics.get("rollout/length_bias", math.nan),
            )
        )
