"""A run resumes from a checkpoint of an earlier version, whose files have other names for what they keep.

`tests/support/earlier_checkpoint` was written by the code at commit c416cd5: two of four steps of the run
below, which was asked to end while one group of the third was still sampled.
"""

import asyncio

import pytest
import torch

from grpo_dist.driver import run
from grpo_dist.runs.checkpoint import newest_whole
from grpo_dist.runs.resume import load_resume_point, load_state
from tests.support import fakes
from tests.support.documents import ROOT

KEPT = ROOT / "tests" / "support" / "earlier_checkpoint"
PROMPTS = fakes.prompts(40)


def config():
    return fakes.config(
        steps=4,
        max_staleness=1,
        weight_sync={"mode": "keep"},
        algorithm={"kl": {"coef": 0.1, "target": 0.5, "gain": 1.0}},
        evaluation={"before": False, "after": False, "every": 2},
        dynamic_sampling={"enabled": True, "max_extra_prompts": 1},
    )


class World(fakes.World):
    async def update(self, batches, *, kl_coef, bounds):
        await super().update(batches, kl_coef=kl_coef, bounds=bounds)
        return {"loss/policy": 0.0, "policy/entropy": 1.0, "ref/kl": 5.0}


def found():
    warnings = []
    checkpoint = newest_whole(KEPT, warnings.append)
    assert warnings == []
    return load_resume_point(checkpoint, load_state(checkpoint, config()), PROMPTS)


def trained(world, **how):
    asyncio.run(run(config(), world.workers(reference=True), PROMPTS, [], world, world, **how))
    return world


def test_a_run_resumes_from_it_as_if_it_had_never_been_interrupted():
    whole, resumed = trained(World(jitter=False)), World(jitter=False)
    resumed.version = 2
    trained(resumed, progress=found().progress)
    for a, b in zip(whole.updates[2:], resumed.updates, strict=True):
        assert torch.equal(a[0].tokens, b[0].tokens) and torch.equal(
            a[0].policy.advantages, b[0].policy.advantages
        )
    assert resumed.kl_coefs == whole.kl_coefs[2:]
    ours, theirs = resumed.saved[4], whole.saved[4]
    assert ours.pipeline.order == theirs.pipeline.order and ours.rewards == theirs.rewards
    assert ours.health == theirs.health


def test_its_finished_groups_are_not_sampled_again():
    point = found()
    kept = {group.prompt.uid for group in point.progress.pipeline.partial[2]}
    resumed = World(jitter=False)
    resumed.version = 2
    trained(resumed, progress=point.progress)
    assert len(kept) == 3 and not kept & {uid for uid, _, _ in resumed.sampled}


def test_its_fields_are_read_under_their_earlier_names():
    progress = found().progress
    assert (progress.step, progress.kl_coef, progress.evaluation_pending) == (2, pytest.approx(0.144), True)
    assert progress.pipeline.order_indices == {2: [10, 11, 12, 13, 14]}
    assert progress.health.best_reward == pytest.approx(0.6)
