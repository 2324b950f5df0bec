"""The samples of each prompt: groups that lack samples, and temperatures of sources."""

import asyncio
import logging
from dataclasses import replace

import numpy as np
import pytest

from grpo_dist.driver import run
from grpo_dist.errors import SamplesFailed
from tests.support import fakes


def train(world, config, prompts):
    asyncio.run(run(config, world.workers(config.needs_reference), prompts, [], world, world))


class Failing(fakes.World):
    """Engines that lose samples. ``had``: number of samples in each draw, by uid."""

    def __init__(self, had):
        super().__init__(jitter=False)
        self.had, self.draws = had, {}

    async def sample(self, prompt, *, seeds, sampling):
        number = self.draws[prompt.uid] = self.draws.get(prompt.uid, 0) + 1
        samples = await super().sample(prompt, seeds=seeds, sampling=sampling)
        count = ([*self.had.get(prompt.uid, ()), len(seeds)] + [len(seeds)] * number)[number - 1]
        if count < sampling.least:
            raise SamplesFailed(f"{count} of {len(seeds)} samples of {prompt.uid}: the engine gave them up")
        return samples[len(samples) - count :]


def config(**changes):
    batch = {"prompts_per_step": 4, "samples_per_prompt": 6} | changes.pop("batch", {})
    algorithm = {"advantage": {"std": "none"}, "skip_idle_rows": False}
    return fakes.config(steps=1, batch=batch, algorithm=algorithm, **changes)


@pytest.mark.parametrize("settings", [{}, {"dynamic_sampling": {"enabled": True}}])
def test_a_group_is_trained_with_the_samples_that_are_there(settings):
    complete, short = fakes.World(jitter=False), Failing({"p1": [4]})
    for world in (complete, short):
        train(world, config(**settings), fakes.prompts(4))
    assert [len(updates[0]) for updates in (complete.updates[0], short.updates[0])] == [24, 22]
    sizes = {g.prompt.uid: len(g.rollouts) for g in short.sampled_groups["step_000001"]}
    assert sizes == {"p0": 6, "p1": 4, "p2": 6, "p3": 6}
    assert short.logged[1]["group/size_min"] == 4 and short.logged[1]["group/size_mean"] == 5.5
    assert complete.logged[1]["group/size_min"] == complete.logged[1]["group/size_mean"] == 6
    (batch,) = short.updates[0]
    assert batch.denominators.sequences == 22 and batch.denominators.tokens == 44
    group = next(g for g in short.sampled_groups["step_000001"] if g.prompt.uid == "p1")
    # The baseline is the mean of the four existing samples; other groups are unchanged.
    centred = group.rewards - group.rewards.mean()
    (group_id,) = [int(i) for i in batch.group_ids.unique() if (batch.group_ids == i).sum() == 4]
    advantages = batch.policy.advantages[batch.group_ids == group_id]
    assert np.allclose(advantages.max(dim=1).values + advantages.min(dim=1).values, centred)


def test_a_group_with_too_few_samples_is_drawn_again_with_other_seeds(caplog):
    world = Failing({"p1": [2, 1], "p2": [0]})
    with caplog.at_level(logging.WARNING, "grpo_dist"):
        train(world, config(), fakes.prompts(4))
    assert world.draws == {"p0": 1, "p1": 3, "p2": 2, "p3": 1}
    seeds = [seed for uid, draw_seeds, _ in world.sampled if uid == "p1" for seed in draw_seeds]
    assert len(seeds) == len(set(seeds)) == 18
    assert world.logged[1]["group/size_min"] == 6
    assert "2 of 6 samples of p1" in caplog.text
    assert "at least 3, half of `batch.samples_per_prompt`" in caplog.text


def test_a_group_that_fails_three_times_ends_the_run_with_its_prompt():
    world = Failing({"p1": [2, 2, 2]})
    with pytest.raises(SamplesFailed, match=r"2 of 6 samples of p1.*last of 3 draws.*at least 3, half of"):
        train(world, config(), fakes.prompts(4))


def test_how_many_samples_suffice_by_hand():
    def least(**batch):
        return fakes.config(batch=batch).batch.least_samples

    assert [least(samples_per_prompt=n) for n in (2, 3, 5, 8)] == [2, 2, 3, 4]
    world = Failing({"p1": [4]})
    settings = fakes.config(
        steps=1,
        batch={"prompts_per_step": 4, "samples_per_prompt": 6},
        algorithm={"advantage": {"name": "pass_at_k", "k": 4}},
    )
    train(world, settings, fakes.prompts(4))
    assert world.draws["p1"] == 2  # four samples have no advantage for the best of four


@pytest.mark.parametrize("order", ["launched", "completion"])
def test_a_source_is_sampled_and_trained_at_its_own_temperature(order):
    temperatures = {}

    class Recording(fakes.World):
        async def sample(self, prompt, *, seeds, sampling):
            temperatures[prompt.uid] = sampling.temperature
            return await super().sample(prompt, seeds=seeds, sampling=sampling)

    prompts = [replace(p, source="code" if i % 4 == 0 else "math") for i, p in enumerate(fakes.prompts(8))]
    train_sources = [{"path": "math.jsonl"}, {"path": "code.jsonl", "temperature": 0.5}]
    world = Recording(jitter=False)
    settings = fakes.config(
        steps=2, data={"train": train_sources}, max_staleness=1, algorithm={"skip_idle_rows": False},
        batch={"prompts_per_step": 4, "samples_per_prompt": 2, "order": order}, sampling={"temperature": 0.8},
    )  # fmt: skip
    train(world, settings, prompts)
    assert temperatures == {f"p{i}": 0.5 if i % 4 == 0 else 0.8 for i in range(8)}
    trained = sorted(temperature for (batch,) in world.updates for temperature in batch.temperatures.tolist())
    assert trained == [0.5] * 4 + [0.8] * 12
    logged = [world.logged[step]["sampling/temperature"] for step in (1, 2)]
    assert sum(logged) / 2 == pytest.approx((4 * 0.5 + 12 * 0.8) / 16)


def test_only_a_source_that_compares_with_the_greedy_answer_samples_one():
    requests = []

    class Recording(fakes.World):
        async def sample(self, prompt, *, seeds, sampling):
            requests.append((prompt.uid, sampling.temperature == 0))
            return await super().sample(prompt, seeds=seeds, sampling=sampling)

    prompts = [replace(p, source="code" if i % 2 else "math") for i, p in enumerate(fakes.prompts(4))]
    parts = {"advantage": "remax", "loss": "gspo"}
    sources = [{"path": "math.jsonl"}, {"path": "code.jsonl", "algorithm": parts}]
    world = Recording(jitter=False)
    train(world, config(data={"train": sources}), prompts)
    assert sorted(uid for uid, greedy in requests if greedy) == ["p1", "p3"] and len(requests) == 6
    (batch,) = world.updates[0]
    assert sorted(batch.policy.loss_ids.tolist()) == [0] * 12 + [1] * 12
