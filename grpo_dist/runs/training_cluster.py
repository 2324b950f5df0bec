"""The verbs of a running cluster, for a user-written loop: sample, score, update, sync.

    caller's thread    sample(prompts) ....... score ... update ... sync     returns when it is done
    event loop thread  workers, their supervision, deadlines                 runs from `open` to `close`

`Verbs` has them as coroutines; `TrainingCluster` calls these synchronously, so that they work in a script and
in a notebook, whose event loop is busy. Two threads may call at once: one samples the next prompts while the
other updates.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from grpo_dist.algorithms.moments import Moments
from grpo_dist.config import AlgorithmConfig, Config, DistillationConfig
from grpo_dist.data.columns import uids_of
from grpo_dist.data.order import OrderState
from grpo_dist.errors import SamplesLost, UserError, as_user_errors
from grpo_dist.evaluation.sampling import evaluate
from grpo_dist.health import HealthState, HealthWatch
from grpo_dist.loop.groups import FrozenModels, GroupDraw, GroupScorer, ScoredBatch, ScoredGroup
from grpo_dist.loop.metrics import staleness_metrics, trained_metrics
from grpo_dist.loop.pipeline import build_order
from grpo_dist.loop.progress import ScheduleState
from grpo_dist.loop.sampling_schedule import KLController, SamplingSchedule, sampling_used
from grpo_dist.loop.staging import Staging
from grpo_dist.loop.sync_probe import SyncProbe
from grpo_dist.policy.full_weights import why_no_export
from grpo_dist.runs.prepare import RunInputs
from grpo_dist.runs.run_directory import set_template_date
from grpo_dist.runs.run_weights import pinned
from grpo_dist.runs.start import load_inputs
from grpo_dist.runtime.concurrency import deadline, gather, sample_until_enough
from grpo_dist.runtime.metering import Stopwatch
from grpo_dist.runtime.recorder import Recorder
from grpo_dist.runtime.seeds import request_seeds
from grpo_dist.runtime.stage_log import print_line, stage, stages_logged
from grpo_dist.types import Group, Prompt, Rollout, Sampling, training_rows
from grpo_dist.workers import Workers

if TYPE_CHECKING:  # Ray takes seconds to import
    from actors.cluster import Cluster

T = TypeVar("T")

_CLOSED = "the cluster was closed during this call; close it once all threads have their results"


class Notes(Recorder):
    """Prints warnings, and records nothing."""

    def quarantine(self, step: int, groups: list[Group]) -> str:
        """Write nothing: the caller has the batch."""
        return "the caller's memory"

    def warn(self, message: str) -> None:
        print_line(message)


def _check_division(updates: int, groups: int) -> None:
    """Raise UserError if the groups cannot be split into the updates of a step."""
    if groups == 0 or groups % updates:
        raise UserError(
            f"update(): {groups} groups cannot be split into `batch.updates_per_step` = {updates} equal "
            "parts; pass a multiple of it"
        )


def _check_user_advantages(algorithm: AlgorithmConfig, distillation: DistillationConfig) -> None:
    """Raise UserError if the caller's advantages would replace advantages with a KL term."""
    if algorithm.kl.in_reward:
        raise UserError(
            "update(): your advantages drop the KL term that `algorithm.kl.in_reward` = true adds to the "
            "run's advantages; set it to false: the KL is then in the loss"
        )
    if distillation.teachers and distillation.kl_as == "advantage":
        raise UserError(
            "update(): your advantages drop the KL to `distillation.teachers`, part of the run's advantages; "
            "set `distillation.kl` to sampled or top_k, or remove the teachers"
        )


def _check_fit(advantages: list[np.ndarray], groups: Sequence[Group]) -> None:
    """Raise UserError if ``advantages`` are not finite numbers [G] for each group."""
    expected = [(len(group.rollouts),) for group in groups]
    shapes = [values.shape for values in advantages]
    if shapes != expected:
        raise UserError(
            f"update(): advantages have the shapes {shapes}; expected one array for "
            f"each group, with a number for each sample: {expected}"
        )
    if not all(np.isfinite(values).all() for values in advantages):
        raise UserError("update(): advantages have a NaN or infinity; use 0 for what is not to be trained on")


@dataclass(frozen=True, slots=True)
class SampledGroup:
    """A prompt and its samples, not scored yet."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    reference: Any = field(default=None, repr=False, compare=False)  # handle to the samples, for workers


@dataclass(frozen=True, slots=True)
class RunningUpdate:
    """An update whose metrics no caller has yet."""

    groups: tuple[ScoredGroup, ...]
    task: asyncio.Task[dict[str, float]]


class Verbs:
    """The verbs as coroutines of one event loop."""

    def __init__(self, config: Config, inputs: RunInputs, actors: Cluster) -> None:
        self.inputs, self.step = inputs, 0
        unrecorded = config.tracking.model_copy(update={"samples": False})
        self._config = config.model_copy(update={"tracking": unrecorded})
        self._actors, self._stack = actors, AsyncExitStack()
        self._notes = Notes()
        self._order = build_order(config, inputs.prompts, OrderState())
        self._uids = set(uids_of(inputs.prompts))  # the caller may sample others, too
        self._batch = 0  # returned by `batch`: the step, or the next one while an update runs
        self._indices: dict[int, list[int]] = {}  # order indices by batch
        self._samples_drawn = Counter[str]()  # samples of each prompt since the last update
        self._synced = 0  # version that the engines hold
        self._probed = -1  # version whose probe was started
        self._running: RunningUpdate | None = None

    async def start(self) -> None:
        config, explain = self._config, self._actors.where_stuck
        await self._stack.enter_async_context(self._actors)
        up = deadline(config.cluster.timeouts.up_s, "start: actors up and models loaded", explain=explain)
        async with up:
            self._workers = await self._actors.start_training(self.inputs.model_dir)
        await self._workers.sync.push(version=0)
        self._parts(self._workers)
        await self._stack.enter_async_context(self._probe)

    async def stop(self) -> None:
        if self._running is not None:
            self._running.task.cancel()
            await asyncio.gather(self._running.task, return_exceptions=True)
        await self._stack.aclose()

    def _parts(self, workers: Workers) -> None:
        config = self._config
        self._schedule = SamplingSchedule(config.sampling, ScheduleState())
        self._sampling: dict[int, Sampling] = {}  # only the current step
        self._draw = GroupDraw.from_config(config)
        self._scorer = GroupScorer(
            workers,
            self._sampling,
            seed=config.seed,
            draw=self._draw,
            finished={},
            models=FrozenModels(workers, config.distillation, with_kl=config.has_kl_term),
        )
        self._staging = Staging(config, workers.policy, Moments(), self.inputs.demonstrations)
        self._probe = SyncProbe(config, workers, self.inputs.prompts, self._notes, start=0)
        self._health = HealthWatch(config, self._notes, HealthState())
        self._kl = KLController(config.algorithm.kl)

    async def batch(self) -> list[Prompt] | None:
        """Return the prompts of the next update; None once `steps` updates have begun."""
        number = self._batch
        if number >= self._config.steps:
            return None
        if number not in self._indices:
            self._indices[number] = self._order.take(number)
        return [self.inputs.prompts[self._order.prompt(index)] for index in self._indices[number]]

    async def sample(self, prompts: Sequence[Prompt], samples: int | None) -> list[SampledGroup]:
        if self._synced == self.step != self._probed:
            self._probed = self.step
            self._probe.begin(self.step)
        count, sampling = samples or self._draw.samples, self._sampling_now()
        least = min(count, self._draw.least)
        # An update may end before the tasks begin, or draw again.
        step, draws = self.step, self._samples_drawn

        async def one(prompt: Prompt, first: int) -> SampledGroup:
            prompt_sampling = replace(self._scorer.sampling_for(prompt, sampling), least=least)
            firsts = [first]  # sample number at which each draw begins; calls do not overlap

            def seeds(number: int) -> list[int]:
                if number == len(firsts):
                    firsts.append(draws[prompt.uid])
                    draws[prompt.uid] += count
                samples = range(firsts[number], firsts[number] + count)
                return request_seeds(self._config.seed, step, prompt.uid, samples)

            async def fetched(seeds: Sequence[int]) -> SampledGroup:
                reply = await self._workers.rollouts.sample(prompt, seeds=seeds, sampling=prompt_sampling)
                rollouts = reply if isinstance(reply, tuple) else await reply
                return SampledGroup(prompt, rollouts, reply)

            return await sample_until_enough(fetched, seeds, least=least)

        work = []
        for prompt in prompts:
            work.append(one(prompt, draws[prompt.uid]))
            draws[prompt.uid] += count
        return await self._within("sampled", work)

    def _sampling_now(self) -> Sampling:
        return self._sampling.setdefault(self.step, self._schedule.of(self.step))

    async def score(self, sampled: Sequence[SampledGroup]) -> list[ScoredGroup]:
        self._sampling_now()  # a greedy baseline is drawn like the samples

        async def one(group: SampledGroup) -> ScoredGroup:
            try:
                rollouts_or_reference = group.rollouts if group.reference is None else group.reference
                return await self._scorer.score_samples(group.prompt, rollouts_or_reference, self.step)
            except SamplesLost:  # their node is lost; ``group`` still has them
                return await self._scorer.score_samples(group.prompt, group.rollouts, self.step)

        return await self._within("scored", [one(group) for group in sampled])

    async def update(
        self, scored: Sequence[ScoredGroup], advantages: Sequence[np.ndarray] | None
    ) -> dict[str, float]:
        """Train, to the end even if this call is cancelled: the ranks do not stop halfway.

        Raises UserError if a cancelled call has trained on the same groups.
        """
        # Copies: the caller may overwrite its arrays.
        advantage_arrays = None if advantages is None else [np.array(a, np.float32) for a in advantages]
        before = self._running
        await self._settled()
        if before is not None and tuple(map(id, before.groups)) == tuple(map(id, scored)):
            raise UserError(
                "update(): an earlier call has trained on these groups, and its update counts, even if "
                "interrupted; sample again"
            )
        task = asyncio.create_task(self._update(scored, advantage_arrays), name=f"update {self.step + 1}")
        self._running = RunningUpdate(tuple(scored), task)
        return await self._result_of(self._running)

    async def _settled(self) -> None:
        """Wait for a running update. Raises its error if its caller was interrupted."""
        if (running := self._running) is not None:
            await asyncio.wait([running.task])  # bounded: by the deadlines of the policy
            if self._running is running:  # its caller has no result yet
                await self._result_of(running)

    async def _result_of(self, running: RunningUpdate) -> dict[str, float]:
        await asyncio.wait([running.task])  # bounded: by the deadlines of the policy
        if self._running is running:
            self._running = None
        return running.task.result()  # bounded: it is done

    async def _update(
        self, scored: Sequence[ScoredGroup], advantages: list[np.ndarray] | None
    ) -> dict[str, float]:
        groups = [s.group for s in scored]
        _check_division(self._config.batch.updates_per_step, len(groups))
        self._check_staleness(groups)
        if advantages is not None:
            _check_user_advantages(self._config.algorithm, self._config.distillation)
            _check_fit(advantages, groups)
        self._batch = self.step + 1
        try:
            return await self._train(ScoredBatch(list(scored), advantages=advantages))
        finally:
            self._batch = self.step  # if the update failed, its prompts are next again

    async def _train(self, batch: ScoredBatch) -> dict[str, float]:
        step, timer, groups = self.step, Stopwatch(), [s.group for s in batch.scored]
        staged = await self._staging.take(step, batch, kl_coef=self._kl.coef)
        metrics = dict(staged.metrics)
        if self._synced == step:
            metrics |= await self._probe.finish(step, timer)
        judged = self._health.judge_batch(
            step + 1, groups, metrics, user_advantages=batch.advantages is not None
        )
        trainable, metrics = judged
        if trainable:
            bounds = self._health.update_bounds()
            policy = self._workers.policy
            metrics |= await policy.update(staged.updates, kl_coef=self._kl.coef, bounds=bounds)
            self._probe.after_update(step, metrics)
            self._health.after_update(step + 1, metrics, groups)
        metrics |= trained_metrics(staged, metrics, trained=trainable) | self._kl.observe(metrics)
        alarms, counts = self._health.examine(step + 1, metrics)
        indices = self._indices.pop(step, [])
        self._order.trained(indices, [g for g in groups if g.prompt.uid in self._uids])
        self._schedule.observe(groups, sampling_used(groups, self._sampling_now()))
        self._sampling.clear()
        self._samples_drawn, self.step = Counter(), step + 1
        self._scorer.forget(step)
        self._health.act(self.step, alarms, metrics | counts, groups)
        return metrics | counts

    async def sync(self) -> dict[str, float]:
        await self._settled()
        metrics = await self._workers.sync.push(version=self.step)
        every = self._config.reference.refresh_every
        # At the first sync after a multiple: a caller may make several updates between syncs.
        refreshes = every > 0 and self.step // every > self._synced // every
        if self._workers.reference_sync is not None and refreshes:
            await self._workers.reference_sync.refresh()
        self._synced = self.step
        return metrics

    async def evaluate(self) -> dict[str, float]:
        explain = self._workers.where_stuck
        sets = self.inputs.eval_sets
        return await evaluate(self._config, self._workers, sets, self._notes, step=self.step, explain=explain)

    async def export(self, directory: Path) -> None:
        """Write the model. Raises UserError where ``directory`` holds anything but an earlier export."""
        _check_replaceable(directory)
        await self._settled()
        directory.parent.mkdir(parents=True, exist_ok=True)
        await self._workers.policy.export(directory, tokenizer_dir=self.inputs.model_dir)

    async def _within(self, done: str, work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """Return the results of ``work``, within `cluster.timeouts.sample_s`."""
        what, explain = f"{len(work)} groups of step {self.step} are {done}", self._workers.where_stuck
        async with deadline(self._config.cluster.timeouts.sample_s, what, explain=explain):
            return await gather(work)

    def _check_staleness(self, groups: Sequence[Group]) -> None:
        rows = training_rows([rollout for group in groups for rollout in group.rollouts])
        staleness = staleness_metrics(rows, self.step)["rollout/staleness_max"]
        allowed = self._config.max_staleness
        if staleness <= allowed:
            return
        forgotten = "" if self._synced == self.step else ", and sync() was not called since the last update"
        raise UserError(
            f"update(): its samples are {staleness:.0f} update(s) older than the policy, and `max_staleness` "
            f"= {allowed}{forgotten}; call sync() after update() and before sample(), or raise that bound"
        )


def _check_replaceable(directory: Path) -> None:
    """Raise UserError if an export to ``directory`` would delete anything but an earlier export."""
    if reason := why_no_export(directory):
        raise UserError(
            f"export(): {directory} is no earlier export ({reason}), and an export replaces what is there; "
            "choose a directory that is new, empty, or holds an earlier export"
        )


class TrainingCluster:
    """The workers of a configuration, controlled by the caller. Created by `grpo_dist.cluster`.

        with grpo_dist.cluster("my.yaml") as cluster:
            for prompts in cluster.batches():
                groups = cluster.score(cluster.sample(prompts))
                metrics = cluster.update(groups)
                cluster.sync()

    This loop gives the numbers of `train` with `max_staleness` 0. It writes no run directory: it keeps no
    metrics, samples or checkpoints, and a lost policy rank ends it. Lost engines and reward workers are
    replaced.
    """

    def __init__(self, config: Config) -> None:
        """Raise UserError for settings that only `train` supports."""
        only_train = {
            "dynamic_sampling.enabled": config.dynamic_sampling.enabled,
            "batch.order: completion": config.batch.order.name == "completion",
            "evaluation.num_workers": config.evaluation.num_workers > 0,
            "health.action: rollback": config.health.action.kind == "rollback",
        }
        for key in (key for key, is_set in only_train.items() if is_set):
            raise UserError(f"`{key}` is supported by train() alone; remove it for your own loop")
        if config.is_supervised:
            raise UserError("a supervised stage samples nothing, so the four verbs have no use; call train()")
        self._config = config
        self._loop: _LoopThread | None = None
        self._work: Verbs | None = None

    def open(self) -> TrainingCluster:
        """Start all workers. Raises UserError for unusable input, before any worker starts, and if they have
        started already.
        """
        if self._work is not None:
            raise UserError("the cluster is open already; `with` opens it, so call open() or use `with`")
        with stages_logged(enabled=self._config.tracking.console):
            inputs, actors = self._load_inputs()
            self._work = Verbs(self._config, inputs, actors)
            self._loop = _LoopThread()
            try:
                self._loop.run(self._work.start())
            except BaseException:
                self.close()
                raise
        return self

    def close(self) -> None:
        """End all workers. Safe to call twice. Calls running in other threads raise UserError."""
        work, self._work = self._work, None
        loop, self._loop = self._loop, None
        if work is not None and loop is not None:
            loop.end(work.stop())

    def __enter__(self) -> TrainingCluster:
        return self.open()

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def step(self) -> int:
        """Return how many updates have ended."""
        return self._opened.step

    @property
    def prompts(self) -> Sequence[Prompt]:
        """Return all prompts of `data.train`."""
        return self._opened.inputs.prompts

    def batches(self) -> Iterator[list[Prompt]]:
        """Yield the prompts of each step until `steps` updates have begun, in the order of the run's seed.

        The prompts of a step stay the same until `update` is called. While it runs, other threads get the
        prompts of the next step.
        """
        while (prompts := self._call(self._opened.batch())) is not None:
            yield prompts

    def sample(self, prompts: Sequence[Prompt], *, samples: int | None = None) -> list[SampledGroup]:
        """Sample every prompt, all at once.

        A prompt that is sampled again before the next update gets other samples.

        Args:
            samples: of each prompt; None: `batch.samples_per_prompt`.

        Raises:
            TimeoutError: `cluster.timeouts.sample_s` has passed.
            WorkerLost: an engine is lost, and no restart is left.
            UserError: as `evaluate`.
        """
        _refuse_others("sample", "prompts", prompts, Prompt, "from `batches` or `prompts`")
        return self._call(self._opened.sample(prompts, samples))

    def score(self, sampled: Sequence[SampledGroup]) -> list[ScoredGroup]:
        """Compute the rewards of all samples, and their reference log-probs if the loss needs them.

        Raises TimeoutError and WorkerLost as `sample`.
        """
        _refuse_others("score", "sampled", sampled, SampledGroup, "what `sample` returns")
        return self._call(self._opened.score(sampled))

    def update(
        self, groups: Sequence[ScoredGroup], *, advantages: Sequence[np.ndarray] | None = None
    ) -> dict[str, float]:
        """Train on ``groups``, with the loss of `algorithm`, and return the metrics of the step.

        As in `train`, a step that fails the checks of `health` is not trained on: see `health/low_signal`.
        An update that Ctrl-C interrupts still finishes, and counts: `sync` waits for it, and `update`, too,
        which then refuses to train on the same ``groups``.

        Args:
            advantages: [G] of each group, used as they are, also of samples without a reward; None: computed
                by `algorithm.advantage`.

        Raises:
            UserError: the samples are older than `max_staleness` updates; the groups are not scored, or do
                not divide into `batch.updates_per_step`; the advantages do not fit; an interrupted update
                has trained on the groups.
            Unhealthy: engine and policy are not the same model, the weights are not finite, or `health` says
                so.
            StateLost: a policy rank is lost.
        """
        _refuse_others("update", "groups", groups, ScoredGroup, "what `score` returns")
        return self._call(self._opened.update(groups, advantages))

    def sync(self) -> dict[str, float]:
        """Send the policy's weights to the engines, and refresh the reference if `reference.refresh_every`
        says so. Returns metrics of the transfer.
        """
        return self._call(self._opened.sync())

    def evaluate(self) -> dict[str, float]:
        """Sample and score `data.eval` with the settings of `evaluation`; return `eval/SET/pass@k` and more.
        The engines have the weights of the last `sync`.

        Raises UserError after an `update` without `sync` if the engines share the policy's GPUs: they have
        dropped the previous weights.
        """
        with self._logged("evaluation", "held-out problems are sampled and scored"):
            return self._call(self._opened.evaluate())

    def export(self, directory: str | Path) -> Path:
        """Write the policy in Hugging Face format, with its tokenizer, and return the directory. It replaces
        an earlier export there. Raises UserError where the directory holds anything else.
        """
        path = Path(directory)
        with self._logged("export", f"the policy is written to {path}"):
            self._call(self._opened.export(path))
        return path

    def _load_inputs(self) -> tuple[RunInputs, Cluster]:
        """Check all input and connect to Ray, in the caller's thread."""
        with stage("actors", "their code is loaded"):
            from actors.cluster import Cluster  # Ray takes seconds to import
            from actors.connection import fit
        with as_user_errors():
            self._config = pinned(set_template_date(self._config))
            has = fit(self._config)
            inputs = load_inputs(self._config, print_line, device="cuda" if has.gpus else "cpu")
        actors = Cluster(self._config, inputs.teacher_dirs)
        actors.connect()
        return inputs, actors

    @property
    def _opened(self) -> Verbs:
        if self._work is None:
            raise UserError("the cluster is not open; use it as `with grpo_dist.cluster(...) as cluster:`")
        return self._work

    @contextmanager
    def _logged(self, name: str, what: str) -> Iterator[None]:
        with stages_logged(enabled=self._config.tracking.console), stage(name, what):
            yield

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        loop = self._loop
        if loop is None:  # another thread has closed the cluster since this call began
            work.close()
            raise UserError(_CLOSED)
        return loop.run(work)


class _LoopThread:
    """An event loop in a separate thread. Other threads may call `run` concurrently, also while it ends."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="grpo-dist cluster", daemon=True)
        self._calls: set[asyncio.Task[Any]] = set()  # running calls; only the loop's thread uses it
        self._lock, self._ending = threading.Lock(), False
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``work``. An exception here, such as KeyboardInterrupt, cancels it. Raises
        UserError if the loop ends meanwhile.
        """
        with self._lock:
            if self._ending:
                work.close()
                raise UserError(_CLOSED)
            future = asyncio.run_coroutine_threadsafe(self._tracked(work), self._loop)
        try:
            return _result(future)
        except CancelledError as error:
            raise UserError(_CLOSED) from error  # by `end`: nothing else cancels calls

    def end(self, last: Coroutine[Any, Any, None]) -> None:
        """Cancel all running calls, run ``last``, and stop the loop."""
        with self._lock:
            self._ending = True  # so that no call begins after the cancellation
        try:
            _result(asyncio.run_coroutine_threadsafe(self._cancel_then(last), self._loop))
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()  # bounded: the loop was just stopped
            self._loop.close()

    async def _tracked(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        try:
            return await work
        finally:
            self._calls.discard(task)

    async def _cancel_then(self, last: Coroutine[Any, Any, None]) -> None:
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await last


def _result(future: Future[T]) -> T:
    """Wait for the result of a coroutine. An exception here, such as KeyboardInterrupt, cancels it."""
    try:
        return future.result()  # bounded: the work has deadlines
    except BaseException:
        future.cancel()
        raise


def _refuse_others(verb: str, name: str, items: Sequence[Any], kind: type, expected: str) -> None:
    """Raise UserError if ``items`` contains anything but ``kind``."""
    wrong = next((item for item in items if not isinstance(item, kind)), None)
    if wrong is not None:
        hint = "; call score() on them first" if isinstance(wrong, SampledGroup) else ""
        raise UserError(
            f"{verb}(): {name} has a {type(wrong).__name__}; expected a sequence of {kind.__name__}, "
            f"{expected}{hint}"
        )
