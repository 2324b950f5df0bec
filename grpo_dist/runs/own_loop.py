"""Four verbs on a running cluster, for those who write their own loop: sample, score, update, sync.

    caller's thread    sample(prompts) ....... score ... update ... sync     returns when it is done
    thread of a loop   workers, their supervision, deadlines                 runs from `open` to `close`

The calls are synchronous, so that they work in a script and in a notebook, whose own event loop is busy. Two
threads may call at once: one samples the next prompts while the other updates.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from grpo_dist.config import Config
from grpo_dist.errors import UserError, refusals
from grpo_dist.loop.groups import ScoredGroup
from grpo_dist.runs.prepare import RunInputs
from grpo_dist.runs.run_directory import dated
from grpo_dist.runs.start import load_inputs
from grpo_dist.runs.verbs import SampledGroup, Verbs
from grpo_dist.runtime.stage_log import print_line, stage, stages_logged
from grpo_dist.types import Prompt

if TYPE_CHECKING:  # Ray takes seconds to import
    from actors.cluster import Cluster

T = TypeVar("T")

_CLOSED = "the cluster was closed during this call; close it once all threads have their results"


class TrainingCluster:
    """The workers of a configuration, in the hands of the caller. Made by `grpo_dist.cluster`.

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
        """Raises UserError for settings that only `train` follows."""
        only_train = {
            "dynamic_sampling.enabled": config.dynamic_sampling.enabled,
            "batch.order: completion": config.batch.order.name == "completion",
            "evaluation.num_workers": config.evaluation.num_workers > 0,
            "health.action: rollback": config.health.action == "rollback",
        }
        for key in (key for key, is_set in only_train.items() if is_set):
            raise UserError(f"`{key}` is followed by train() alone; remove it for a loop of your own")
        if config.is_supervised:
            raise UserError("a supervised stage samples nothing, so the four verbs have no use; call train()")
        self._config = config
        self._loop: _LoopThread | None = None
        self._work: Verbs | None = None

    def open(self) -> TrainingCluster:
        """Start all workers. Raises UserError for input that cannot be used, before any worker starts, and
        where they have started already.
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
        """End all workers. Safe to call twice. A call that another thread has open raises UserError."""
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
        """How many updates have ended."""
        return self._opened.step

    @property
    def prompts(self) -> Sequence[Prompt]:
        """All prompts of `data.train`."""
        return self._opened.inputs.prompts

    def batches(self) -> Iterator[list[Prompt]]:
        """Yield the prompts of each step until `steps` updates have begun, in the order of the run's seed.

        The prompts of a step stay the same until `update` is called. While it runs, another thread gets those
        of the next step.
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
        """
        _refuse_others("sample", "prompts", prompts, Prompt, "those of `batches` or `prompts`")
        return self._call(self._opened.sample(prompts, samples))

    def score(self, sampled: Sequence[SampledGroup]) -> list[ScoredGroup]:
        """Compute the rewards of all samples, and their reference log-probs where the loss needs them.

        Raises as `sample`.
        """
        _refuse_others("score", "sampled", sampled, SampledGroup, "what `sample` returns")
        return self._call(self._opened.score(sampled))

    def update(
        self, groups: Sequence[ScoredGroup], *, advantages: Sequence[np.ndarray] | None = None
    ) -> dict[str, float]:
        """Train on ``groups``, with the loss of `algorithm`, and return the metrics of the step.

        As in `train`, a step that fails the checks of `health` is not trained on: see `health/low_signal`.
        An update that Ctrl-C interrupts still ends, and counts: `sync` waits for it, and so does `update`,
        which returns its metrics where ``groups`` and ``advantages`` are the same.

        Args:
            advantages: [G] of each group, used as they are; None: those of `algorithm.advantage`.

        Raises:
            UserError: the samples are older than `max_staleness` updates; the groups are not scored, or do
                not divide into `batch.updates_per_step`; the advantages do not fit, or differ from those of
                an interrupted update of the same groups.
            Unhealthy: engine and policy are not the same model, the weights are not finite, or `health` says
                so.
            StateLost: a policy rank is lost.
        """
        _refuse_others("update", "groups", groups, ScoredGroup, "what `score` returns")
        return self._call(self._opened.update(groups, advantages))

    def sync(self) -> dict[str, float]:
        """Send the policy's weights to the engines, and refresh the reference where `reference.refresh_every`
        has it due. Returns metrics of the transfer.
        """
        return self._call(self._opened.sync())

    def evaluate(self) -> dict[str, float]:
        """Sample and score `data.eval` with the settings of `evaluation`; return `eval/SET/pass@k` and more.
        The engines have the weights of the last `sync`.
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
        """Check all input and connect to Ray, in the thread of the caller."""
        with stage("actors", "their code is loaded"):
            from actors.cluster import Cluster  # Ray takes seconds to import
            from actors.connection import fit
        self._config = dated(self._config)
        with refusals():
            has = fit(self._config)
            inputs = load_inputs(self._config, print_line, device="cuda" if has.gpus else "cpu")
        for warning in inputs.warnings:
            print_line(warning)
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
        if loop is None:  # another thread has closed the cluster since the verb was called
            work.close()
            raise UserError(_CLOSED)
        return loop.run(work)


class _LoopThread:
    """An event loop in a thread of its own. Other threads may call `run` at once, also while it ends."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="grpo-dist cluster", daemon=True)
        self._calls: set[asyncio.Task[Any]] = set()  # that run; of the loop's thread
        self._lock, self._ending = threading.Lock(), False
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``work``. An exception here, such as KeyboardInterrupt, cancels it. Raises
        UserError where the loop ends meanwhile.
        """
        with self._lock:
            if self._ending:
                work.close()
                raise UserError(_CLOSED)
            future = asyncio.run_coroutine_threadsafe(self._tracked(work), self._loop)
        try:
            return _result(future)
        except CancelledError as error:
            raise UserError(_CLOSED) from error  # by `end`: nothing else cancels it

    def end(self, last: Coroutine[Any, Any, None]) -> None:
        """Cancel the calls that run, do ``last``, and stop the loop."""
        with self._lock:
            self._ending = True  # so no call begins after those that are cancelled
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


def _refuse_others(verb: str, name: str, given: Sequence[Any], kind: type, expected: str) -> None:
    """Raise UserError where ``given`` has something other than ``kind``."""
    wrong = next((item for item in given if not isinstance(item, kind)), None)
    if wrong is not None:
        hint = "; call score() on them first" if isinstance(wrong, SampledGroup) else ""
        raise UserError(
            f"{verb}(): {name} has a {type(wrong).__name__}; expected a sequence of {kind.__name__}, "
            f"{expected}{hint}"
        )
