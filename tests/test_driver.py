"""The real loop on fake workers: order, staleness, resuming, deadlines, and how failures end it."""

import asyncio

import fakes
import pytest
import torch

from grpo_dist.driver import run
from grpo_dist.evaluate import EvalSet


def train(world, config, prompts, eval_sets=(), **kwargs):
    workers = world.workers(reference=config.needs_reference)
    asyncio.run(run(config, workers, prompts, list(eval_sets), world, world, **kwargs))


def test_synchronous_loop_samples_updates_and_syncs_in_turn():
    world, config = fakes.World(), fakes.config(steps=3)
    train(world, config, fakes.prompts(20))
    loop = [e for e in world.events if not e.startswith("samples")]
    assert loop == [
        "update at version 0", "sync 1 with 0 in flight",
        "update at version 1", "sync 2 with 0 in flight",
        "update at version 2", "sync 3 with 0 in flight",
    ]  # fmt: skip
    assert [world.logged[s]["rollout/staleness_max"] for s in (1, 2, 3)] == [0, 0, 0]


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_no_token_is_staler_than_the_bound_and_the_bound_is_used(staleness):
    world, config = fakes.World(), fakes.config(steps=6, max_staleness=staleness)
    train(world, config, fakes.prompts(40))
    seen = [world.logged[s]["rollout/staleness_max"] for s in range(1, 7)]
    assert max(seen) == staleness
    assert seen[-1] == staleness


@pytest.mark.parametrize("staleness", [0, 2])
def test_every_prompt_of_an_epoch_is_trained_once(staleness):
    world, config = fakes.World(), fakes.config(steps=5, max_staleness=staleness)
    train(world, config, fakes.prompts(20))
    assert sorted(uid for uid, _, _ in world.sampled) == sorted(f"p{i}" for i in range(20))


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_batches_do_not_depend_on_the_order_in_which_groups_finish(staleness):
    batches = []
    for jitter in (True, False, True):
        world = fakes.World(jitter=jitter)
        train(world, fakes.config(max_staleness=staleness), fakes.prompts(40))
        batches.append(world.updates)
    for other in batches[1:]:
        for a, b in zip(batches[0], other, strict=True):
            assert torch.equal(a[0].tokens, b[0].tokens) and torch.equal(a[0].advantages, b[0].advantages)


@pytest.mark.parametrize("staleness", [0, 2])
def test_resuming_from_a_checkpoint_repeats_the_uninterrupted_run(staleness):
    whole = fakes.World()
    train(whole, fakes.config(steps=6, max_staleness=staleness), fakes.prompts(40))

    config = fakes.config(steps=6, max_staleness=staleness, checkpoint={"every": 3})
    first = fakes.World()
    train(first, config, fakes.prompts(40))
    assert sorted(first.saved[3]) == list(range(3, 3 + staleness))

    second = fakes.World()
    second.version = 3
    train(second, config, fakes.prompts(40), start=3, ahead=first.saved[3])
    for a, b in zip(whole.updates[3:], second.updates, strict=True):
        assert torch.equal(a[0].tokens, b[0].tokens)
    resampled = {uid for uid, _, _ in second.sampled}
    kept = {g.prompt.uid for groups in first.saved[3].values() for g in groups}
    assert not resampled & kept


def test_reference_logprobs_reach_the_batch_only_when_kl_is_on():
    world = fakes.World()
    train(world, fakes.config(steps=1), fakes.prompts(8))
    assert world.updates[0][0].ref_logprobs is None
    world = fakes.World()
    train(world, fakes.config(steps=1, algorithm={"kl": {"coef": 0.1}}), fakes.prompts(8))
    batch = world.updates[0][0]
    assert torch.equal(batch.ref_logprobs, torch.where(batch.loss_mask, -1.0, 0.0))


def test_updates_per_step_splits_whole_groups_with_their_own_denominators():
    world = fakes.World()
    batch = {"prompts_per_step": 4, "samples_per_prompt": 2, "updates_per_step": 2}
    train(world, fakes.config(steps=1, batch=batch), fakes.prompts(8))
    first, second = world.updates[0]
    assert (len(first), len(second)) == (4, 4)
    assert (first.num_tokens, first.num_sequences) == (8.0, 4.0)


@pytest.mark.parametrize(("after", "seen"), [(False, [0, 2, 4]), (True, [0, 2])])
def test_evaluation_comes_before_training_and_every_n_steps(after, seen):
    """At the last step only where no evaluation of the exported model follows."""
    world = fakes.World()
    how = {"before": True, "after": after, "every": 2, "samples_per_prompt": 2, "k": [1, 2]}
    train(
        world, fakes.config(steps=4, evaluation=how), fakes.prompts(20), [EvalSet("held", fakes.prompts(3))]
    )
    assert [s for s, m in sorted(world.logged.items()) if "eval/held/pass@1" in m] == seen
    assert world.logged[0]["eval/held/pass@1"] == 1.0  # the fake grader calls everything correct
    assert {"eval/held/pass@1_stderr", "eval/held/pass@2"} <= set(world.logged[2])


def test_failure_of_one_sample_ends_the_run_with_its_own_error():
    world = fakes.World(fail_on="p3")
    with pytest.raises(RuntimeError, match="engine died on p3"):
        train(world, fakes.config(steps=5), fakes.prompts(20))


def test_a_batch_that_is_not_sampled_in_time_is_named():
    world = fakes.World()

    async def stuck(prompt, *, seeds, sampling):
        await asyncio.sleep(60)

    world.sample = stuck
    config = fakes.config(cluster={"timeouts": {"sample_s": 0.05}})
    with pytest.raises(TimeoutError, match=r"sample: batch 0.*0\.05 s"):
        train(world, config, fakes.prompts(20))


def test_the_control_deals_the_same_rewards_to_other_samples():
    world, control = fakes.World(), fakes.World()
    batch = {"prompts_per_step": 8, "samples_per_prompt": 4}
    train(world, fakes.config(steps=2, batch=batch, algorithm={"std": "none"}), fakes.prompts(20))
    shuffled = fakes.config(steps=2, batch=batch, algorithm={"std": "none"}, rewards={"shuffle": True})
    train(control, shuffled, fakes.prompts(20))
    for mine, dealt in zip(world.updates, control.updates, strict=True):
        assert torch.equal(mine[0].tokens, dealt[0].tokens)
        assert not torch.equal(mine[0].advantages, dealt[0].advantages)
    assert world.logged[1]["reward/mean"] == control.logged[1]["reward/mean"]
