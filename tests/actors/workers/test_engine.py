"""One real vLLM engine, fed by one real DeepSpeed rank: what is sampled, and what a weight sync leaves
behind.

The engine runs in mode ``keep``, so that weights can change under requests in flight; between requests that
is the same as ``drain``.
"""

import asyncio

import numpy as np
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from grpo_dist.policy.model import TokenLogprobs
from grpo_dist.policy.packing import padded
from grpo_dist.types import Prompt
from tests.support.engines import world_of
from tests.support.real_engine import PROMPTS, World, difference, same

pytestmark = pytest.mark.machine
world = world_of(World)


@pytest.fixture(scope="module")
def trainer_model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


def test_rollouts_are_complete_records(world):
    for prompt, rollouts in zip(PROMPTS, world.sample_all(), strict=True):
        assert [r.sample for r in rollouts] == [0, 1, 2]
        for rollout in rollouts:
            assert rollout.prompt_uid == prompt.uid
            length = len(rollout.completion_ids)
            assert len(rollout.logprobs) == len(rollout.policy_versions) == length
            assert rollout.finish_reason == (
                "length" if length == 24 and rollout.completion_ids[-1] != 1 else "stop"
            )
            assert (rollout.logprobs < 0).all()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_the_trainers_at_the_sampling_temperature(world, trainer_model, temperature):
    for prompt, rollouts in zip(PROMPTS, world.sample_all(temperature=temperature), strict=True):
        assert difference(trainer_model, prompt, rollouts, temperature) < 1e-5


def test_samples_follow_from_their_seeds_alone(world):
    together = world.sample_all()
    alone = [world.sample_all([p], seeds=(1, 2, 3))[0] for p in reversed(PROMPTS)][::-1]
    for a, b in zip(together, alone, strict=True):
        assert same(a, b)
    other = world.sample_all(seeds=(4, 5, 6))
    assert not any(same(a, b) for a, b in zip(together, other, strict=True))


def test_a_prompt_longer_than_one_prefill_is_sampled_with_its_seed(world):
    """Chunked prefill would crash a CPU engine with seeded requests; many long prompts exceed one prefill."""
    prompts = [Prompt(f"long{i}", np.full(200, 11 + i, np.int32), "1", "test") for i in range(20)]
    assert all(len(rollouts) == 3 for rollouts in world.sample_all(prompts, max_new_tokens=2))


def test_the_samples_of_a_group_share_one_prefill_of_their_prompt(world):
    """A prompt of 200 tokens: the first sample computes it. The other 7 wait, find its 6 full blocks of 32
    tokens, and copy the 7 tokens left before the last. A single later sample finds only full blocks.
    """
    prompt = Prompt("shared", np.arange(200, dtype=np.int32) % 50 + 11, "1", "test")
    world.cached()
    [group] = world.sample_all([prompt], seeds=range(8))
    assert sorted(world.cached()) == [0] + [199] * 7
    alone = [world.sample_all([prompt], seeds=(seed,))[0][0] for seed in range(8)]
    assert world.cached() == [192] * 8
    assert same(group, alone)
    world.push()  # drops what was computed under other weights
    assert same(group, world.sample_all([prompt], seeds=range(8))[0])
    assert sorted(world.cached()) == [0] + [199] * 7


def test_a_sample_has_exactly_the_requested_length(world):
    lengths = (1, 7, 100)
    [group] = world.sample_all(PROMPTS[:1], lengths=lengths, max_new_tokens=100)
    assert tuple(len(r.completion_ids) for r in group) == lengths
    assert [r.finish_reason for r in group] == ["length"] * 3


def test_a_completion_ends_with_the_token_that_completes_a_stop_text(world):
    """``stop`` holds for samples; a sample of an exact length passes it."""
    (whole,) = world.run(world.sample(PROMPTS[0], [5], lengths=(24,)))
    text = whole.text
    place = next(i for i in range(3, 20) if text[i] not in text[:i])
    (cut,) = world.run(world.sample(PROMPTS[0], [5], stop=(text[place],)))
    assert cut.text == text[: place + 1] and cut.finish_reason == "stop"
    kept = len(cut.completion_ids)
    np.testing.assert_array_equal(cut.completion_ids, whole.completion_ids[:kept])
    np.testing.assert_allclose(cut.logprobs, whole.logprobs[:kept], atol=1e-6)
    (exact,) = world.run(world.sample(PROMPTS[0], [5], stop=(text[place],), lengths=(24,)))
    np.testing.assert_array_equal(exact.completion_ids, whole.completion_ids)


def test_one_long_sample_does_not_hold_the_slots_of_its_finished_siblings(world):
    """Two groups of 16 fill the pool's room, each with one sample of 200 tokens. The next batch is sampled
    while those two run: the engine does not wait for the longest.
    """
    lengths, order = (200, *[2] * 15), []

    async def named(prompt, **sampling):
        await world.sample(prompt, list(range(16)), **sampling)
        order.append(prompt.uid)

    async def batches():
        skewed = [named(p, lengths=lengths, max_new_tokens=200) for p in PROMPTS[:2]]
        await asyncio.gather(*skewed, *(named(p, lengths=(2,) * 16) for p in PROMPTS[2:]))

    world.run(batches())
    assert set(order[:2]) == {"p2", "p3"} and set(order[2:]) == {"p0", "p1"}


def test_after_a_sync_the_engine_samples_from_the_moved_weights(world, trainer_model):
    """Tied embeddings included: the head must follow the embedding, also the second time."""
    for seed in (11, 12):
        weights = world.move(seed)
        before = world.sample_all()
        metrics = world.push()
        after = world.sample_all()
        trainer_model.load_state_dict(weights, strict=False)
        trainer_model.tie_weights()
        assert metrics["sync/bytes"] == sum(w.numel() * 4 for w in weights.values())
        for prompt, old, new in zip(PROMPTS, before, after, strict=True):
            assert difference(trainer_model, prompt, new) < 1e-5
            assert difference(trainer_model, prompt, old) > 0.1
            assert all((r.policy_versions == world.version).all() for r in new)


def test_requests_in_flight_continue_under_the_new_weights_and_record_the_version(world, trainer_model):
    old_weights = {n: p.detach().clone() for n, p in trainer_model.named_parameters()}
    new_weights = world.move(13)

    async def sync_under_way():
        engine = world.rollouts.workers[0]
        before = await engine.steps.remote()
        running = [asyncio.create_task(world.sample(p, list(range(64)), max_new_tokens=200)) for p in PROMPTS]
        while await engine.steps.remote() < before + 3:
            await asyncio.sleep(0.01)
        world.version += 1
        await world.sync.push(world.version)
        return await asyncio.gather(*running)

    groups = world.run(sync_under_way())
    mixed = [r for g in groups for r in g if len(set(r.policy_versions.tolist())) == 2]
    assert mixed, "no request was in flight; nothing was tested"
    models = {}
    for version, weights in ((world.version - 1, old_weights), (world.version, new_weights)):
        models[version] = AutoModelForCausalLM.from_config(trainer_model.config).float().eval()
        models[version].load_state_dict(weights, strict=False)
        models[version].tie_weights()
    by_uid = {p.uid: p for p in PROMPTS}
    for rollout in mixed[:8]:
        assert (np.diff(rollout.policy_versions) >= 0).all()
        prompt = by_uid[rollout.prompt_uid]
        ids = torch.tensor(np.concatenate([prompt.token_ids, rollout.completion_ids]).astype(np.int64))[None]
        mask = torch.zeros_like(ids, dtype=torch.bool)
        mask[:, len(prompt.token_ids) :] = True
        for version, model in models.items():
            with torch.no_grad():
                values = TokenLogprobs(model, temperature=1.0, chunk_mib=8)(padded(ids, mask))[0][0].numpy()
            here = rollout.policy_versions == version
            gap = np.abs(values[len(prompt.token_ids) :] - rollout.logprobs)
            assert gap[here].max() < 1e-5
            assert gap[~here].max() > 0.01
    trainer_model.load_state_dict(new_weights, strict=False)
    trainer_model.tie_weights()


def test_a_transfer_corrupted_on_the_way_ends_the_run(world):
    """Last in this file: the engine is of no use afterwards."""
    ray.get(world.policy.ranks[0].corrupt_next_transfer.remote())
    with pytest.raises(Exception, match=r"received bytes with checksum \d+, the policy sent \d+"):
        world.push()
