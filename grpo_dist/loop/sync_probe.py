"""The sync probe: the engines sample, and the policy computes the log-probs of the same tokens."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from grpo_dist.config import Config
from grpo_dist.errors import RERUN, Unhealthy
from grpo_dist.runtime.concurrency import deadline, gather
from grpo_dist.runtime.metering import Stopwatch
from grpo_dist.runtime.recorder import Recorder
from grpo_dist.runtime.seeds import derived_seed
from grpo_dist.types import Group, Prompt, Rollout, Sampling
from grpo_dist.workers import Workers

RowKey = tuple[str, bytes, int | None]  # prompt, tokens, and the object with the routes


@dataclass(frozen=True, slots=True)
class ProbeSamples:
    """Samples of ``engine`` for each prompt of the probe; ``groups`` is empty if the engine was lost."""

    engine: Any
    groups: list[tuple[Prompt, tuple[Rollout, ...]]]


def distinct_groups(sampled: Sequence[tuple[Prompt, tuple[Rollout, ...]]]) -> list[Group]:
    """Make one group per prompt, with each distinct completion once.

    Engines that agree bit by bit sample the same, so the policy's batch does not depend on their number.
    With `policy.router_replay` each engine has a separate row, for the experts it took. The engines'
    log-probs are replaced by 0: a batch drops samples with a NaN, and NaN is a difference to find.
    """
    prompts: dict[str, Prompt] = {}
    completions: dict[str, dict[RowKey, Rollout]] = {}
    for prompt, rollouts in sampled:
        prompts[prompt.uid] = prompt
        for rollout in rollouts:
            tokens = replace(rollout, logprobs=np.zeros_like(rollout.logprobs))
            completions.setdefault(prompt.uid, {}).setdefault(row_key(prompt, rollout), tokens)
    return [
        Group(
            prompts[uid],
            tuple(rollouts.values()),
            np.zeros(len(rollouts), np.float32),
            {},
            ("",) * len(rollouts),
        )
        for uid, rollouts in completions.items()
    ]


def rows_by_key(groups: Sequence[Group]) -> dict[RowKey, int]:
    """Return the row of each completion in the batch of ``groups``, by its `row_key`."""
    flat = [(group.prompt, rollout) for group in groups for rollout in group.rollouts]
    return {row_key(prompt, rollout): row for row, (prompt, rollout) in enumerate(flat)}


def row_key(prompt: Prompt, rollout: Rollout) -> RowKey:
    """Return a key for the policy's log-probs of ``rollout``, valid while its routes are in use."""
    routes = None if rollout.routes is None else id(rollout.routes)
    return prompt.uid, rollout.completion_ids.tobytes(), routes


# Bound on the mean difference, nats per token, by the policy's dtype, or the quantisation of the engines.
#
# float32: a dense model differs by 1e-7 to 1e-6 on a CPU, and by about 1e-4 where a GPU kernel multiplies in
# TF32. A wrong tensor in the engine gives 1e-2 and more.
#
# bfloat16: one rounding is at most 2^-9 of a value, 0.06 of a logit between 16 and 32, where the likely
# tokens of trained models are. Engine and trainer round at different places: other kernels, other shapes, one
# token at a time instead of all at once. Measured on a CPU, a forward over all tokens against decoding with a
# cache, random weights with logits of deviation 3 to 5 and an entropy of 3 to 6 nats, which is a hard case
# (a trained model's confident tokens hardly differ): 12 layers of width 512 0.036 to 0.061, 24 of width 896
# 0.069 (0.23 at most). The same models with one norm 10 % off: 0.23 to 0.40; with one matrix of another
# layer: 2.4 to 6.1. The bound lies between.
#
# fp8: three bits of mantissa where bfloat16 has seven. The same random models, with weights and inputs of
# all linear layers rounded as vLLM does (a scale for each output and each token): 12 layers 0.35 to 0.50, 24
# layers 0.44 to 0.76. With one matrix of another layer in addition: 1.3 to 3.5; with one layer replaced
# by another: 3.5 to 7.4. Smaller defects do not show: run a few steps without quantisation for them.
BOUNDS = {"float32": 1e-3, "bfloat16": 0.15, "fp8": 1.0}

_PROMPTS, _SAMPLES, _TOKENS = 2, 2, 32  # per probe and engine
_PATIENCE = 3  # consecutive probes of one engine with no token to compare
_POLL_S = 0.2  # interval of looking for a serving engine


@dataclass(frozen=True, slots=True)
class LogprobDifference:
    """|policy - engine| log-prob over ``tokens`` tokens, in nats."""

    mean: float
    largest: float
    tokens: int

    @classmethod
    def from_differences(cls, differences: np.ndarray) -> LogprobDifference:
        absolute = np.abs(differences)
        return cls(float(absolute.mean()), float(absolute.max()), len(absolute))

    def __str__(self) -> str:
        return f"{self.mean:.3g} nats on average, {self.largest:.3g} at most, over {self.tokens} tokens"


class SyncProbe:
    """Probes the engines of a run that starts at step ``start``; an async context manager."""

    def __init__(
        self, config: Config, workers: Workers, prompts: Sequence[Prompt], recorder: Recorder, *, start: int
    ) -> None:
        self._settings, self._sampling, self._seed = config.weight_sync, config.sampling, config.seed
        self._quantization = config.rollout.quantization
        self._sample_s = config.cluster.timeouts.sample_s
        self._prompts, self._recorder, self._start = prompts, recorder, start
        self._probes, self._where_stuck = workers.probe, workers.where_stuck
        self._passed: dict[str, tuple[Any, int]] = {}  # by name: engine, and the version it was compared at
        self._missed = Counter[str]()
        self._bound: tuple[float, str] | None = None  # value and text; set by the first comparison
        self._task: asyncio.Task[dict[str, ProbeSamples]] | None = None

    def begin(self, step: int) -> None:
        """Start sampling on the engines that are due. Engines and policy hold version ``step``."""
        if due := self._due(step):
            self._task = asyncio.create_task(self._sample(step, due), name=f"sync probe {step}")

    async def finish(self, step: int, timer: Stopwatch) -> dict[str, float]:
        """Compare before the update of ``step``; return metrics if `weight_sync.probe_every` schedules one.

        Raises Unhealthy if an engine and the policy are not the same model.
        """
        if self._probes is None or (self._task is None and self._is_done(step)):
            return {}
        with timer("probe"):
            stage = f"sync probe: samples of version {step}"
            async with deadline(self._sample_s, stage, explain=self._where_stuck):
                sampled = await self._all_samples(step)
            dtype, differences = await self._compare(step, sampled)
        metrics = _metrics(differences)
        self._judge(step, dtype, sampled, differences, metrics)
        # Other probes depend on when the run was resumed or lost an engine. They are events only, so that a
        # resumed run logs the same metrics as an uninterrupted one.
        return metrics if self._is_scheduled(step) else {}

    def after_update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Check the update's ``mismatch`` metrics against the bound if the step is on-policy.

        Raises Unhealthy before any engine or checkpoint has the weights of that update.
        """
        on_policy = metrics["rollout/staleness_max"] == metrics["rollout/staleness_mean"] == 0
        if self._bound is None or not on_policy:
            return
        bound, limit = self._bound
        mean = metrics.get("mismatch/logprob_diff_mean", 0.0)
        if mean > bound:
            largest = metrics.get("mismatch/logprob_diff_max", mean)
            problems = [
                f"log-probs of its own samples differ by {mean:.3g} nats on average, {largest:.3g} at most"
            ]
            message = _message(step, problems, limit, "Stopped; no checkpoint has this update")
            self._recorder.log(step + 1, dict(metrics))
            self._recorder.note(message)
            raise Unhealthy(message)

    async def __aenter__(self) -> SyncProbe:
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _is_scheduled(self, step: int) -> bool:
        every = self._settings.probe_every
        return step % every == 0 if every else step == 0

    def _since(self, step: int) -> int:
        """Return the version at which all engines were last due."""
        every = self._settings.probe_every
        return max(self._start, step // every * every) if every else self._start

    def _is_done(self, step: int) -> bool:
        """Return whether no serving engine is due; if none serves, whether one passed since all were due."""
        return not self._due(step) and any(v >= self._since(step) for _, v in self._passed.values())

    def _due(self, step: int) -> dict[str, Any]:
        """Return by name the serving engines not compared since they joined, or since all were due."""
        since = self._since(step)
        serving = self._probes.engines() if self._probes else {}

        def is_due(name: str, engine: Any) -> bool:
            probed, version = self._passed.get(name, (None, -1))
            return probed is not engine or version < since

        return {name: engine for name, engine in serving.items() if is_due(name, engine)}

    async def _all_samples(self, step: int) -> dict[str, ProbeSamples]:
        """Collect the samples of every engine that is due, waiting until at least one serves.

        Engines lost since `begin` are left out; those that joined since sample now. The caller sets the
        deadline.
        """
        assert self._probes is not None
        task, self._task = self._task, None
        sampled = await task if task is not None else {}
        while not (serving := self._probes.engines()) and not self._is_done(step):
            await asyncio.sleep(_POLL_S)
        due = self._due(step)
        late = {n: e for n, e in due.items() if n not in sampled or sampled[n].engine is not e}
        sampled = sampled | await self._sample(step, late)
        return {name: samples for name, samples in sampled.items() if serving.get(name) is samples.engine}

    async def _sample(self, step: int, engines: Mapping[str, Any]) -> dict[str, ProbeSamples]:
        """Sample the same prompts with the same seeds on each engine."""
        assert self._probes is not None
        count = len(self._prompts)
        prompts = [self._prompts[(step * _PROMPTS + i) % count] for i in range(min(_PROMPTS, count))]
        seeds = [derived_seed(self._seed, f"sync probe {step}, sample {i}") for i in range(_SAMPLES)]
        sampling = Sampling(
            self._sampling.first_temperature,
            self._sampling.top_p,
            self._sampling.top_k,
            min(_TOKENS, self._sampling.longest),
            min_p=self._sampling.min_p,
        )
        answers = await gather(self._probes.sample(e, prompts, seeds, sampling) for e in engines.values())
        return {
            name: ProbeSamples(engine, list(zip(prompts, groups, strict=bool(groups))))
            for (name, engine), groups in zip(engines.items(), answers, strict=True)
        }

    async def _compare(
        self, step: int, sampled: Mapping[str, ProbeSamples]
    ) -> tuple[str, dict[str, LogprobDifference | None]]:
        """Return the policy's dtype, and each engine's difference; None: no token has version ``step``."""
        assert self._probes is not None
        groups = distinct_groups([samples for s in sampled.values() for samples in s.groups])
        if not groups:
            return "", dict.fromkeys(sampled)
        from grpo_dist.batch.rows import make_batch  # imports torch, which a plan does without

        batch = make_batch(
            groups,
            [np.zeros(len(group.rollouts), np.float32) for group in groups],
            ref_logprobs=None,
            max_new_tokens=_TOKENS,
        )
        rows = rows_by_key(groups)
        dtype, policy = await self._probes.logprobs(batch)
        differences: dict[str, LogprobDifference | None] = {}
        for name, samples in sampled.items():
            parts = [
                (policy[rows[row_key(prompt, r)]].astype(np.float64) - r.logprobs)[r.policy_versions == step]
                for prompt, rollouts in samples.groups
                for r in rollouts
            ]
            joined = np.concatenate(parts) if parts else np.empty(0)
            differences[name] = LogprobDifference.from_differences(joined) if len(joined) else None
        return dtype, differences

    def _judge(
        self,
        step: int,
        dtype: str,
        sampled: Mapping[str, ProbeSamples],
        differences: Mapping[str, LogprobDifference | None],
        metrics: dict[str, float],
    ) -> None:
        precision = dtype if self._quantization == "none" else self._quantization
        bound = self._settings.probe_above or BOUNDS.get(precision, min(BOUNDS.values()))
        limit = f"bound {bound:g} in {precision}"
        self._bound = (bound, limit) if dtype else self._bound
        wrong = []
        for name, difference in differences.items():
            if difference is None:
                self._not_compared(step, name)
            elif difference.mean <= bound:  # NaN is not
                self._passed[name], self._missed[name] = (sampled[name].engine, step), 0
                self._recorder.note(f"sync probe of {name} at version {step}: {difference} ({limit})")
            else:
                wrong.append(f"{name} and the policy differ by {difference}")
        if wrong:
            message = _message(step, wrong, limit, "Stopped before the update")
            self._recorder.log(step + 1, metrics)
            self._recorder.note(message)
            raise Unhealthy(message)

    def _not_compared(self, step: int, name: str) -> None:
        """Warn; the engine stays due. Raises Unhealthy after `_PATIENCE` consecutive times."""
        self._missed[name] += 1
        what = (
            f"step {step + 1}: the sync probe of {name} has no token of version {step}, so nothing shows "
            "that the engine holds the policy's weights"
        )
        if self._missed[name] >= _PATIENCE:
            raise Unhealthy(
                f"{what}; {_PATIENCE} times in a row. Stopped before the update. {RERUN.capitalize()}; if it "
                "stops again, report it"
            )
        self._recorder.warn(f"{what}; the next step probes it again")


def _metrics(differences: Mapping[str, LogprobDifference | None]) -> dict[str, float]:
    """Return the metrics of the largest difference; {} if no engine was compared."""
    compared = [difference for difference in differences.values() if difference is not None]
    if not compared:
        return {}
    return {
        "probe/logprob_diff_mean": max(d.mean for d in compared),
        "probe/logprob_diff_max": max(d.largest for d in compared),
    }


def _message(step: int, wrong: Sequence[str], limit: str, stopped: str) -> str:
    return (
        f"step {step + 1}: engine and trainer are not the same model at version {step}: {'; '.join(wrong)} "
        f"({limit}, `weight_sync.probe_above`). {stopped}. Set model.dtype=float32 to see whether precision "
        "is the cause; remove `rollout.quantization` and settings of `rollout.engine`; report "
        "a model whose architecture the engine computes differently. Raise `weight_sync.probe_above` only "
        "for a difference that you know, with `algorithm.correction` for it"
    )
