"""Measures the driver's time per completion, for several batch sizes and numbers of workers.

    python -m tests.evidence.driver_scaling [--turns 8] [--order completion]

The real loop, pipeline, batching, metrics and tracking (metrics, TensorBoard, one table of samples a step)
run on simulated workers that return generated records at once, so that only the driver's time is measured.
The first table has workers in the driver's process. The second has Ray actors behind the real handles, one
process each, so it includes Ray's calls and the transfer of the records into the driver.

`total`: CPU time of all threads of the driver's process, Ray's included. `loop`: CPU time of the event loop's
thread, which everything else waits for. `wall`: time of the step. Simulated workers take no time, but actors
that share the driver's cores add theirs to `wall`. With --turns the samples are episodes with that many
turns, and a last column has the cost of a turn: (total - total of completions of the same length) / turns.
With --order completion a step takes the groups that complete first, with 1.5 times as many in flight; groups
then complete one by one, as in a run, and the loop handles each completion separately.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grpo_dist import driver
from grpo_dist.config import Config
from grpo_dist.observe.tracker import Tracker
from grpo_dist.runtime.load_balancer import LoadBalancer
from grpo_dist.tools.bench.record import NoCheckpoints
from grpo_dist.types import Group, Prompt, Sampling, TrainBatch
from grpo_dist.workers import RolloutsRef, Workers
from tests.support.made_groups import shard
from tests.support.made_records import LONGEST, made_group, made_prompts, made_rollouts

SAMPLES_PER_PROMPT = 8
RANKS = 2
_WARM_UP = 2  # steps before the clocks count

WorkersOf = Callable[[Config, list[Prompt], int], AbstractAsyncContextManager[Workers]]


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds per completion in the median step."""

    samples: int
    workers: int
    total_us: float
    loop_us: float
    wall_us: float


def measure(
    samples: int, workers: int, workers_of: WorkersOf, turns: int = 0, *, order: str = "launched"
) -> Cost:
    """Measure a short run with ``samples`` a step on ``workers`` simulated rollout workers. ``turns``: turns
    per sample; 0: completions. ``order``: `batch.order`.
    """
    config = scaling_config(samples, workers, order)
    prompts = scaling_prompts(config)
    with tempfile.TemporaryDirectory() as directory:
        recorder = Clocked(config, Path(directory))

        async def session() -> None:
            async with workers_of(config, prompts, turns) as simulated:
                await driver.run(config, simulated, prompts, [], recorder, NoCheckpoints())

        with recorder:
            asyncio.run(session())
    steps = np.diff(np.array(recorder.clocks[_WARM_UP - 1 :]), axis=0)
    total, loop, wall = (statistics.median(column) / samples * 1e6 for column in steps.T.tolist())
    return Cost(samples, workers, total, loop, wall)


def scaling_config(samples: int, workers: int, order: str = "launched") -> Config:
    """Return settings with staging on (`max_staleness` 1) and enough steps for a median."""
    return Config.model_validate(
        {
            "model": {"path": "simulated"},
            "data": {"train": [{"path": "simulated"}]},
            "batch": {
                "prompts_per_step": samples // SAMPLES_PER_PROMPT,
                "samples_per_prompt": SAMPLES_PER_PROMPT,
                "order": order,
            },
            "sampling": {"max_new_tokens": LONGEST},
            "rollout": {"num_workers": workers},
            "policy": {"num_workers": RANKS},
            "rewards": {"num_workers": 4},
            "evaluation": {"before": False, "after": False},
            "checkpoint": {"export": False},
            "tracking": {"console": False},
            "max_staleness": 1,
            "steps": _WARM_UP + (20 if samples < 4096 else 5),
        }
    )


def scaling_prompts(config: Config) -> list[Prompt]:
    """Make an epoch of one step; of two if a step leaves groups in flight, which need other prompts."""
    steps = 2 if config.batch.order.name == "completion" else 1
    return made_prompts(steps * config.batch.prompts_per_step)


class Clocked(Tracker):
    """A run's tracker that also records the clocks at the end of each step."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        super().__init__(config, run_dir)
        self.clocks: list[tuple[float, float, float]] = []

    def log(self, step: int, metrics: dict[str, float]) -> None:
        super().log(step, metrics)
        self.clocks.append((time.process_time(), time.thread_time(), time.perf_counter()))


_CAPACITY = 512  # sequences per simulated worker


class Instant:
    """Plays all worker roles in this process, with precomputed answers."""

    def __init__(self, config: Config, prompts: Sequence[Prompt], turns: int = 0) -> None:
        rng = np.random.default_rng(0)
        self._load_balancer = LoadBalancer(config.rollout.num_workers, _CAPACITY)
        self._groups = {
            p.uid: made_group(p, made_rollouts(p.uid, SAMPLES_PER_PROMPT, rng, turns)) for p in prompts
        }
        # Order `launched` waits for whole batches, so all groups of a step may complete at once.
        singly = config.batch.order.name == "completion"
        self._turn: AbstractAsyncContextManager[None] = asyncio.Lock() if singly else nullcontext()

    async def sample(self, prompt: Prompt, *, seeds: Sequence[int], sampling: Sampling) -> RolloutsRef:
        tokens = len(seeds) * (len(prompt.token_ids) + sampling.max_new_tokens)
        index = await self._load_balancer.admit(len(seeds), tokens)
        async with self._turn:
            await asyncio.sleep(0)
        self._load_balancer.release(index, len(seeds), tokens)
        return self._groups[prompt.uid].rollouts

    async def score(self, prompt: Prompt, rollouts: RolloutsRef) -> Group:
        return self._groups[prompt.uid]

    def stage(self, batches: Sequence[TrainBatch], *, keep_logprobs: bool, later_epochs: Any = ()) -> Any:
        return [shard(batch, RANKS) for batch in batches]

    async def update(self, staged: Any, *, kl_coef: float, bounds: Any) -> dict[str, float]:
        return {"loss/policy": 0.0}

    async def token_logprobs(self) -> dict[int, np.ndarray]:
        return {}

    async def push(self, version: int) -> dict[str, float]:
        return {}


@asynccontextmanager
async def in_process(config: Config, prompts: list[Prompt], turns: int = 0) -> AsyncIterator[Workers]:
    instant: Any = Instant(config, prompts, turns)
    yield Workers(instant, instant, None, instant, instant)


def print_table(
    title: str, cases: Iterable[tuple[int, int]], workers_of: WorkersOf, turns: int, order: str
) -> None:
    """Print each row as soon as its cost is measured."""
    print(f"\n{title}: microseconds per sample")
    print(f"{'samples a step':>15} {'workers':>8} {'total':>8} {'loop':>8} {'wall':>8}", end="")
    print(f" {'a turn':>8}" if turns else "", flush=True)
    for samples, workers in cases:
        c = measure(samples, workers, workers_of, turns, order=order)
        numbers = f"{c.total_us:>8.1f} {c.loop_us:>8.1f} {c.wall_us:>8.1f}"
        if turns:
            plain = measure(samples, workers, workers_of, order=order)
            numbers += f" {(c.total_us - plain.total_us) / turns:>8.1f}"
        print(f"{c.samples:>15,} {c.workers:>8} {numbers}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.evidence.driver_scaling", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--samples", type=int, nargs="+", default=[128, 1024, 8192, 32768], help="a step")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 64], help="simulated rollout workers")
    parser.add_argument("--turns", type=int, default=0, help="of each sample; 0: completions (0)")
    parser.add_argument("--tables", nargs="+", choices=["process", "ray"], default=["process", "ray"])
    parser.add_argument(
        "--order", choices=["launched", "completion"], default="launched", help="`batch.order`"
    )
    options = parser.parse_args(arguments)
    cases = [(samples, workers) for samples in options.samples for workers in options.workers]
    if "process" in options.tables:
        print_table("driver alone", cases, in_process, options.turns, options.order)
    if "ray" in options.tables:
        from tests.support.simulated_actors import private_ray, ray_workers

        with private_ray():
            print_table("driver and Ray", cases, ray_workers, options.turns, options.order)


if __name__ == "__main__":
    main()
