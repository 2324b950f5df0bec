"""Workers without Ray, engines or models: enough to run the real driver loop in milliseconds."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_dist.batch.token_values import ValuesOfSamples
from grpo_dist.config import Config
from grpo_dist.evaluation.sampling import EvalSet
from grpo_dist.loop.progress import Progress
from grpo_dist.loop.updates import make_updates
from grpo_dist.types import Group, Prompt, Rollout, TeacherLogprobs
from grpo_dist.workers import Workers


def prompts(count: int) -> list[Prompt]:
    return [
        Prompt(f"p{i}", np.array([1, 2, 3], np.int32), str(i), "fake", f"problem {i}") for i in range(count)
    ]


def config(**changes) -> Config:
    base = {
        "model": {"path": "demo:tiny"},
        "data": {"train": [{"path": "demo:add3"}]},
        "batch": {"prompts_per_step": 4, "samples_per_prompt": 2},
        "sampling": {"max_new_tokens": 4},
        "evaluation": {"before": False, "after": False},
        "steps": 6,
        # Rewards of fake samples are random, so every step trains, whatever they are.
        "health": {"min_signal_groups": 0},
    }
    return Config.model_validate(base | changes)


class World:
    """Fake workers that share a log of events and the engines' version."""

    def __init__(self, jitter: bool = True, fail_on: str | None = None) -> None:
        self.version, self.events, self.updates, self.in_flight = 0, [], [], 0
        self.kl_coefs: list[float] = []  # one per update
        self.keeps_logprobs: list[bool] = []  # one per batch staged
        self.sampled: list[tuple[str, tuple[int, ...], int]] = []
        self._jitter, self._fail_on = jitter, fail_on
        self.saved: dict[int, Progress] = {}
        self.ledger_entries: dict = {}
        self.logged: dict[int, dict[str, float]] = {}
        self.quarantined: dict[int, list[Group]] = {}
        self.phases: dict[int, list[str]] = {}
        self.sampled_groups: dict[str, list[Group]] = {}
        self.values: dict[str, ValuesOfSamples | None] = {}
        self.warnings: list[str] = []
        self.notes: list[str] = []

    def workers(self, reference: bool = False) -> Workers:
        return Workers(self, self, self if reference else None, self, self)

    async def sample(self, prompt, *, seeds, sampling):
        self.in_flight += 1
        version = self.version
        await asyncio.sleep(random.random() * 0.003 if self._jitter else 0)
        if self._fail_on == prompt.uid:
            raise RuntimeError(f"engine died on {prompt.uid}")
        self.in_flight -= 1
        self.sampled.append((prompt.uid, tuple(seeds), version))
        return tuple(
            Rollout(
                prompt_uid=prompt.uid, sample=i, completion_ids=np.array([seed % 97 + 3, 2], np.int32),
                logprobs=np.full(2, -1.0, np.float32), finish_reason="stop", text="x",
                policy_versions=np.full(2, version, np.int32), temperature=sampling.temperature,
                max_new_tokens=sampling.max_new_tokens,
            )
            for i, seed in enumerate(seeds)
        )  # fmt: skip

    async def score(self, prompt, rollouts):
        rewards = np.array([float(r.completion_ids[0] % 2) for r in rollouts], np.float32)
        return Group(prompt, rollouts, rewards, {"fake": rewards}, ("correct",) * len(rollouts))

    async def logprobs(self, prompt, rollouts, top_k=0):
        return [TeacherLogprobs(np.full(len(r.completion_ids), -1.0, np.float32)) for r in rollouts]

    def stage(self, batches, *, keep_logprobs, later_epochs=()):
        self.keeps_logprobs.append(keep_logprobs)
        return batches

    async def update(self, batches, *, kl_coef, bounds):
        self.events.append(f"update at version {self.version}")
        self.updates.append(batches)
        self.kl_coefs.append(kl_coef)
        return {"loss/policy": 0.0}

    async def score_norms(self, batch):
        self.events.append(f"score norms at version {self.version}")
        return {row: np.full(int(mask.sum()), 0.5, np.float32) for row, mask in enumerate(batch.policy.mask)}

    async def token_logprobs(self):
        rows = (batch.row_ids.tolist() for batch in self.updates[-1])
        return {row: np.array([row, -1.0], np.float32) for ids in rows for row in ids}

    async def load(self, directory):
        raise AssertionError("the loop itself never loads")

    async def export(self, directory, *, tokenizer_dir):
        raise AssertionError("the loop itself never exports")

    async def push(self, version):
        self.events.append(f"sync {version} with {self.in_flight} in flight")
        self.version = version
        return {}

    # recorder and checkpointer
    def log(self, step, metrics):
        self.logged.setdefault(step, {}).update(metrics)

    def spans(self, step, driver_spans, workers):
        self.phases[step] = [span.stage for span in driver_spans]

    def samples(self, name, groups, values=None):
        self.sampled_groups[name], self.values[name] = groups, values
        self.events.append(f"samples {name}")

    def ledger(self, step, entry):
        self.ledger_entries[step] = entry

    def quarantine(self, step, groups):
        self.quarantined[step] = groups
        return f"quarantine/step_{step:06d}.parquet"

    def warn(self, message):
        self.warnings.append(message)

    def note(self, message):
        self.notes.append(message)

    directory = Path("nowhere")

    def phase(self, name):
        if name == "end":
            self.events.append("end")

    async def trace_next(self, run_dir, step):
        self.events.append(f"trace {step}")

    def flush(self):
        """Ignore it: events are recorded already."""

    async def save(self, step, workers, progress):
        self.saved[step] = progress

    async def settle(self):
        """Saving is synchronous."""
        self.events.append("settled")


def make_batches(config, scored, step, **how):
    """Return the updates of the first epoch of a step."""
    return make_updates(config, scored, step, **how)[0]


# Fake evaluation engines, and workers with them.

HELD = [EvalSet("held", [dataclasses.replace(p, uid=f"held {p.uid}") for p in prompts(3)])]
EVERY_2 = {"before": True, "after": False, "every": 2, "samples_per_prompt": 2, "k": [1]}


class Engines:
    """Engines that sample with a snapshot's version; ``rollouts`` and ``rewards`` of an evaluation."""

    def __init__(self, world):
        self.world, self.rollouts, self.rewards = world, self, world
        self.version, self.copied, self.sampled = None, {}, []
        self.gate, self.failure = asyncio.Event(), None
        self.gate.set()

    async def snapshot(self, directory, version):
        assert version == self.world.version == len(self.world.updates)
        self.copied[directory] = version

    async def written(self):
        for directory, version in self.copied.items():
            (directory / "version").write_text(str(version))
        self.copied = {}

    async def load(self, directory):
        self.version = int((directory / "version").read_text())
        return True

    def has_snapshot(self, directory):
        return (directory / "version").exists()

    async def discard(self, directory):
        shutil.rmtree(directory)

    async def sample(self, prompt, *, seeds, sampling):
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        self.sampled.append((self.version, len(self.world.updates)))
        return await self.world.sample(prompt, seeds=seeds, sampling=sampling)


class OwnWorld(World):
    """Workers with evaluation engines, and a run directory."""

    def __init__(self, directory):
        super().__init__(jitter=False)
        self.directory, self.last = directory, None
        self.engines = Engines(self)

    def workers(self, reference=False):
        return dataclasses.replace(super().workers(reference), evaluation=self.engines)

    async def push(self, version):
        assert version == len(self.updates)
        return await super().push(version)

    @property
    def kept(self):
        return sorted(path.name for path in self.directory.glob("evaluation/*"))


# Fake engines and a fake policy for the sync probe.

LOGPROB = -1.0


class Probed(World):
    """Fake engines to probe: the policy's log-probs are -1, an engine's are -1 plus its error.

    ``probed`` has (version, engine names) of every comparison, in order.
    """

    def __init__(self, engines=("rollout-0",), dtype="float32", **options):
        super().__init__(jitter=False, **options)
        self.serving = {name: object() for name in engines}
        self.error, self.dtype = dict.fromkeys(engines, 0.0), dtype
        self.asked: list[tuple[int, str]] = []
        self.rows: list[int] = []
        self.claimed = None  # version label of a probe's samples; None: the true version
        self.requests = []

    def workers(self, reference=False):
        return dataclasses.replace(super().workers(reference), probe=Probes(self))

    def name_of(self, engine):
        return next((name for name, served in self.serving.items() if served is engine), None)

    @property
    def probed(self):
        names: dict[int, list[str]] = {}
        for version, name in self.asked:
            names.setdefault(version, []).append(name)
        return names


class Probes:
    def __init__(self, world):
        self._world = world

    def engines(self):
        return dict(self._world.serving)

    async def sample(self, engine, prompts, seeds, sampling):
        world, name = self._world, self._world.name_of(engine)
        if name is None:
            return []
        version = world.version if world.claimed is None else world.claimed
        world.asked.append((world.version, name))
        world.requests.append((tuple(p.uid for p in prompts), tuple(seeds), sampling))
        await asyncio.sleep(0)
        return [
            tuple(
                Rollout(
                    prompt.uid, i, np.array([seed % 89 + 3, 2], np.int32),
                    np.full(2, LOGPROB + world.error[name], np.float32), "stop", "x",
                    np.full(2, version, np.int32),
                )
                for i, seed in enumerate(seeds)
            )
            for prompt in prompts
        ]  # fmt: skip

    async def logprobs(self, batch):
        self._world.rows.append(len(batch))
        lengths = batch.policy.mask.sum(dim=1).tolist()
        values = [np.full(n, LOGPROB, np.float32) for n in lengths]
        return self._world.dtype, dict(zip(batch.row_ids.tolist(), values, strict=True))


def train(world: World, config: Config, prompts: Sequence[Prompt], **how: Any) -> World:
    """Run the driver's loop with the workers of ``world``, and return it. ``how``: as for `driver.run`;
    ``eval_sets`` default to none.
    """
    from grpo_dist.driver import run

    workers, eval_sets = world.workers(reference=config.needs_reference), how.pop("eval_sets", [])
    asyncio.run(run(config, workers, prompts, eval_sets, world, world, **how))
    return world


def fake_cluster(worlds: list, make: Callable[[], Any]) -> type:
    """Return a fake `actors.cluster.Cluster`, each instance of which appends ``make()`` to ``worlds``."""

    class FakeCluster:
        def __init__(self, config):
            worlds.append(make())

        async def __aenter__(self):
            return self

        async def __aexit__(self, *exc):
            return None

        async def where_stuck(self):
            return ""

        async def start_evaluation(self, model_dir):
            return worlds[-1].workers()

    return FakeCluster
