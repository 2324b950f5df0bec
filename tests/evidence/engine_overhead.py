"""Measures what a step of an engine costs its thread, for several numbers of sequences decoded at once.

    python -m tests.evidence.engine_overhead [--plain] [--sequences 256] [--model DIRECTORY]

Without a GPU the model is made up and answers at once; the engine schedules ahead of its outputs, with vLLM's
scheduler for that, as on a GPU. With a GPU the engine is a run's own.

CPU time of the engine's thread in the median step that decodes all sequences, in microseconds, over all
sequences ("a step") and for one ("a token"):

    schedule    the scheduler chooses what is computed next
    model       the model runner prepares inputs and launches kernels (made up: nothing)
    update      the scheduler takes what was sampled
    outputs     vLLM's output processor, and this project's `SampledTokens` before it
    other       all else of a step, such as this project's loop
    wall        time of a step by the clock, with waiting for the GPU

``--plain``: without what this project puts in the place of vLLM's methods. ``--profile``: print the functions
with the most time of their own for each number of sequences; the profiler makes all of them slower.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import os
import pstats
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from actors.workers import engine_thread
from actors.workers.engine_settings import EngineSpec, fitting_arguments, set_environment, shares_tails
from actors.workers.engine_thread import EngineThread
from grpo_dist.config import ModelConfig, RolloutConfig, WeightSyncConfig
from grpo_dist.runtime.hardware import device_type

PARTS = ("schedule", "model", "update", "outputs")
_PROMPT = list(range(5, 25))
_VOCABULARY = 100


class InstantModel:
    """Computes the steps of an engine's executor: any token at once, with any log-prob."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)

    def execute_model(self, scheduled: Any, non_block: bool = True) -> Future[Any]:
        self._ids = list(scheduled.num_scheduled_tokens)
        return _done(None if self._ids else self._output())

    def sample_tokens(self, grammar: Any, non_block: bool = True) -> Future[Any]:
        return _done(self._output())

    def _output(self) -> Any:
        from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

        count = len(self._ids)
        tokens = self._random.integers(0, _VOCABULARY, (count, 1))
        logprobs = -self._random.random((count, 1), dtype=np.float32)
        return ModelRunnerOutput(
            req_ids=self._ids,
            req_id_to_index={own: row for row, own in enumerate(self._ids)},
            sampled_token_ids=tokens.tolist(),
            logprobs=LogprobsLists(tokens, logprobs, np.ones(count, np.int64)),
        )


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


def schedule_ahead(engine: Any) -> None:
    """Give an engine without a GPU `InstantModel`, and what vLLM's engine core has on GPUs."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    core = engine.engine_core.engine_core
    core.vllm_config.scheduler_config.async_scheduling = core.async_scheduling = True
    core.scheduler = AsyncScheduler(
        vllm_config=core.vllm_config,
        kv_cache_config=core.scheduler.kv_cache_config,
        structured_output_manager=core.structured_output_manager,
        include_finished_set=False,
        log_stats=False,
        block_size=core.scheduler.block_size,
        hash_block_size=core.scheduler.block_size,
    )
    core.scheduler.use_v2_model_runner = True
    core.batch_queue_size, core.batch_queue = 2, deque(maxlen=2)
    core.step_fn = core.step_with_batch_queue
    instant = InstantModel()
    core.model_executor.execute_model = instant.execute_model
    core.model_executor.sample_tokens = instant.sample_tokens


def maker(plain: bool, *, ahead: bool) -> Callable[..., Any]:
    """Return what makes the engine in place of `make_engine`. ``ahead``: see `schedule_ahead`."""
    attach = engine_thread.attach_shortcuts

    def make(arguments: dict[str, Any], imported: Callable[[], None]) -> Any:
        engine_thread.attach_shortcuts = lambda engine: None
        try:
            engine = engine_thread.make_engine(arguments, imported)
        finally:
            engine_thread.attach_shortcuts = attach
        if ahead:
            schedule_ahead(engine)
        if not plain:
            attach(engine)
        return engine

    return make


class Clocks:
    """CPU and wall time of the steps of an engine's thread."""

    def __init__(self, thread: Any, sequences: int, profiled: bool) -> None:
        self._sequences, self._spent, self._decoded = sequences, dict.fromkeys(PARTS, 0.0), 0
        self.steps: list[list[float]] = []  # of each: `PARTS`, the whole step, wall, seconds
        self.profile = cProfile.Profile() if profiled else None
        core, step = thread._core, thread._step
        schedule = core.scheduler.schedule

        def counted(*arguments: Any, **options: Any) -> Any:
            made = schedule(*arguments, **options)
            self._decoded = len(made.num_scheduled_tokens) * (made.total_num_scheduled_tokens == sequences)
            return made

        core.scheduler.schedule = counted
        self._time(core.scheduler, "schedule", "schedule")
        self._time(core.scheduler, "update_from_output", "update")
        for name in ("execute_model", "sample_tokens"):
            self._time(core.model_executor, name, "model")
        self._time(thread._engine.output_processor, "process_outputs", "outputs")
        thread._step = lambda: self._step(step)

    def _time(self, owner: Any, name: str, part: str) -> None:
        function = getattr(owner, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.thread_time()
            result = function(*arguments, **options)
            self._spent[part] += time.thread_time() - began
            return result

        setattr(owner, name, timed)

    def _step(self, step: Callable[[], None]) -> None:
        self._spent, self._decoded = dict.fromkeys(PARTS, 0.0), 0
        began, wall = time.thread_time(), time.perf_counter()
        if self.profile and self.steps:
            self.profile.enable()
        step()
        if self.profile:
            self.profile.disable()
        if self._decoded == self._sequences:
            ended = (time.thread_time() - began, time.perf_counter() - wall)
            self.steps.append([*self._spent.values(), *ended])


def measure(sequences: int, tokens: int, model: Path, plain: bool, profiled: bool) -> Clocks:
    """Decode ``tokens`` of each of ``sequences`` at once."""
    rollout = RolloutConfig(max_num_seqs=sequences, kv_cache_gib=1.0, enforce_eager=device_type() == "cpu")
    spec = EngineSpec(rollout, WeightSyncConfig(), ModelConfig(path=""), str(model), 1024, seed=0)

    async def decode() -> Clocks:
        async def together(count: int, length: int) -> None:
            await asyncio.gather(*(thread.generate(_PROMPT, of(length, i)) for i in range(count)))

        thread = EngineThread(fitting_arguments(spec), shares_tails=shares_tails(spec))
        await thread.start()
        await thread.set_weight_version(0)
        await together(sequences, 8)  # triggers what is lazy
        clocks = await thread.call(lambda: Clocks(thread, sequences, profiled))
        await together(sequences, tokens)
        await thread.shutdown()
        return clocks

    make, engine_thread.make_engine = engine_thread.make_engine, maker(plain, ahead=device_type() == "cpu")
    try:
        return asyncio.run(decode())
    finally:
        engine_thread.make_engine = make


def of(tokens: int, seed: int) -> Any:
    """Return the parameters of a run's request (`RolloutWorker`) of exactly ``tokens``."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=1.0,
        max_tokens=tokens,
        ignore_eos=True,
        seed=seed,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def print_row(sequences: int, clocks: Clocks) -> None:
    *parts, whole, wall = (statistics.median(column) * 1e6 for column in zip(*clocks.steps, strict=True))
    values = [*parts, whole - sum(parts), whole, wall]
    for title, share in (("a step", 1), ("a token", sequences)):
        print(f"{sequences:>9} {title:>8}" + "".join(f"{v / share:>10.2f}" for v in values), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.evidence.engine_overhead", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--sequences", type=int, nargs="+", default=[16, 256, 1024], help="decoded at once")
    parser.add_argument("--tokens", type=int, default=200, help="of each sequence (200)")
    parser.add_argument("--model", type=Path, help="directory (the demo's tiny model)")
    parser.add_argument("--plain", action="store_true", help="vLLM's own methods")
    parser.add_argument("--profile", action="store_true", help="print the functions with the most time")
    chosen = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    set_environment()
    from grpo_dist.demo.model import cached_model

    model = chosen.model or cached_model("tiny", seed=0)
    columns = (*PARTS, "other", "all", "wall")
    print(f"{'sequences':>9} {'us':>8}" + "".join(f"{name:>10}" for name in columns), flush=True)
    for sequences in chosen.sequences:
        clocks = measure(sequences, chosen.tokens, model, chosen.plain, chosen.profile)
        print_row(sequences, clocks)
        if clocks.profile:
            pstats.Stats(clocks.profile).sort_stats("tottime").print_stats(40)


if __name__ == "__main__":
    main()
