"""Workers without Ray, engines or models: enough to run the real driver loop in milliseconds."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import numpy as np

from grpo_dist.batch.token_values import ValuesOfSamples
from grpo_dist.config import Config
from grpo_dist.loop.progress import Progress
from grpo_dist.loop.updates import make_updates
from grpo_dist.types import Group, Prompt, Rollout
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
        # Rewards of fake samples are random, so every step is trained on whatever they are.
        "health": {"min_signal_groups": 0},
    }
    return Config.model_validate(base | changes)


class World:
    """Fake workers that share a log of events and the version the engines hold."""

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
                prompt_uid=prompt.uid,
                sample=i,
                completion_ids=np.array([seed % 97 + 3, 2], np.int32),
                logprobs=np.full(2, -1.0, np.float32),
                finish_reason="stop",
                text="x",
                policy_versions=np.full(2, version, np.int32),
                temperature=sampling.temperature,
                max_new_tokens=sampling.max_new_tokens,
            )
            for i, seed in enumerate(seeds)
        )

    async def score(self, prompt, rollouts):
        rewards = np.array([float(r.completion_ids[0] % 2) for r in rollouts], np.float32)
        return Group(prompt, rollouts, rewards, {"fake": rewards}, ("correct",) * len(rollouts))

    async def logprobs(self, prompt, rollouts):
        return [np.full(len(r.completion_ids), -1.0, np.float32) for r in rollouts]

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
        return {row: np.full(int(own.sum()), 0.5, np.float32) for row, own in enumerate(batch.loss_mask)}

    async def token_logprobs(self):
        rows = (batch.row_ids.tolist() for batch in self.updates[-1])
        return {row: np.array([row, -1.0], np.float32) for own in rows for row in own}

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

    def spans(self, step, own, workers):
        self.phases[step] = [span.stage for span in own]

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
    """The updates of the first epoch of a step."""
    return make_updates(config, scored, step, **how)[0]
