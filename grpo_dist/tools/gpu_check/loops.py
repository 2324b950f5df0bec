"""A few steps of the real loop on the real actors, recorded as a benchmark records them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from grpo_dist import driver
from grpo_dist.config import Config
from grpo_dist.observe.console import step_line
from grpo_dist.runs.prepare import prepare
from grpo_dist.runtime.concurrency import deadline
from grpo_dist.runtime.hardware import device_type
from grpo_dist.runtime.stage_log import print_line
from grpo_dist.tools.bench.record import BenchRecorder, NoCheckpoints, StepRecord
from grpo_dist.tools.gpu_check.lines import CheckTask
from grpo_dist.tools.gpu_check.sizes import engine_sections, update_size

T = TypeVar("T")

STEPS = 3


@dataclass(frozen=True, slots=True)
class LoopSize:
    """How much a step samples.

    Attributes:
        prompts: of a step.
        samples: of each prompt.
        completion: tokens of each sample.
    """

    prompts: int
    samples: int
    completion: int


_SIZES = {False: LoopSize(16, 8, 256), True: LoopSize(2, 4, 12)}  # by whether it is a rehearsal


def loop_config(task: CheckTask, *, dtype: str, **sections: dict[str, Any]) -> Config:
    """Return the configuration of a colocated run with random weights.

    Every step is probed, and no probe ends it: the lines judge what it finds. The learning rate is high, so
    that an engine with the weights of the step before is far off.
    """
    size, engine = _SIZES[task.rehearsal], engine_sections(task, dtype=dtype, eager=dtype == "float32")
    own: dict[str, dict[str, Any]] = {
        "model": engine["model"],
        "data": {
            "train": [{"path": "demo:add3", "split": "train"}],
            "instruction": "Solve",
            "max_prompt_tokens": 32,
        },
        "batch": {
            "prompts_per_step": size.prompts,
            "samples_per_prompt": size.samples,
            "micro_batch_tokens": update_size(task, dtype=dtype, zero_stage=1).micro_batch,
        },
        "sampling": {"max_new_tokens": size.completion},
        "rewards": {"functions": [{"function": "parity"}]},
        "policy": {"zero_stage": 1, "optimizer": {"lr": 1e-3}},
        "rollout": engine["rollout"],
        "weight_sync": {"probe_every": 1, "probe_above": 1e9},
        "evaluation": {"before": False, "after": False},
        "checkpoint": {"every": 0, "export": False, "resume": "never"},
        "health": {"min_signal_groups": 0},
        "tracking": {"samples": False},
        "cluster": {"placement": "colocated"},
    }
    for name, section in sections.items():
        own[name] = own.get(name, {}) | section
    return Config.model_validate(
        {"name": "gpu-check", "output_dir": str(task.directory), "steps": STEPS, **own}
    )


async def steps_of(config: Config, task: CheckTask) -> AsyncIterator[list[StepRecord]]:
    """Run the steps of ``config`` on a cluster of this machine; yield the records so far after each step."""
    from actors.cluster import Cluster  # needs Ray, which other lines do not

    prepared = prepare(config, print_line, device=device_type())
    async with Cluster(config, prepared.teacher_dirs) as cluster:
        async with deadline(config.cluster.timeouts.up_s, "start: actors up and models loaded"):
            workers = await cluster.start_training(prepared.model_dir)
        done = asyncio.Queue[bool]()  # True: a step, False: all of them, or an error

        def after(step: int, metrics: dict[str, float]) -> None:
            print_line(step_line(step, metrics))
            done.put_nowait(True)

        recorder = BenchRecorder(config.seed, task.directory, after)
        steps = asyncio.create_task(
            driver.run(config, workers, prepared.prompts, [], recorder, NoCheckpoints()), name="steps"
        )
        steps.add_done_callback(lambda _: done.put_nowait(False))
        try:
            while await done.get():  # bounded: the loop's stages have deadlines
                yield list(recorder.steps)
            await steps  # bounded: it is done
        finally:
            steps.cancel()


def as_they_come(values: AsyncIterator[T]) -> Iterator[T]:
    """Yield ``values`` as soon as each is there, for a caller without an event loop."""

    async def following() -> T | None:
        return await anext(values, None)

    with asyncio.Runner() as runner:
        while (value := runner.run(following())) is not None:
            yield value
