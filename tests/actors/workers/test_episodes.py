"""Episodes on a real engine that a real rank feeds: what is recorded, and what a weight sync leaves."""

import asyncio
from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.engines import world_of
from tests.support.real_episodes import EpisodeWorld, equal, prompt, trainer_logprobs

pytestmark = [pytest.mark.machine, pytest.mark.slow, pytest.mark.long]

PROMPTS = [prompt("a"), prompt("bcd", turns=5, tokens=20), prompt("ef", turns=1)]

world = world_of(lambda model_dir: EpisodeWorld(model_dir, max_length=1024))


@pytest.fixture(scope="module")
def model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


def with_weights(model, weights):
    copy = AutoModelForCausalLM.from_config(model.config).float().eval()
    copy.load_state_dict(weights, strict=False)
    copy.tie_weights()
    return copy


def gaps(model, prompt, rollout):
    """Return |engine - trainer| of the sampled tokens."""
    sampled = np.ones(len(rollout.completion_ids), bool) if rollout.sampled is None else rollout.sampled
    return np.abs(trainer_logprobs(model, prompt, rollout) - rollout.logprobs)[sampled]


def test_an_episode_is_one_row_that_marks_for_each_token_whether_it_was_sampled(world, model):
    for task_prompt, group in zip(PROMPTS, world.run(world.sample_all(PROMPTS)), strict=True):
        assert [r.sample for r in group] == [0, 1, 2, 3]
        for rollout in group:
            assert rollout.prompt_uid == task_prompt.uid and rollout.finish_reason == "stop"
            assert len(rollout.turns) == task_prompt.task.kwargs["turns"]
            assert gaps(model, task_prompt, rollout).max() < 1e-5
            if len(rollout.turns) == 1:
                assert rollout.sampled is None
                continue
            context = ~rollout.sampled
            assert (rollout.logprobs[context] == 0).all() and (rollout.policy_versions[context] == -1).all()
            assert (rollout.logprobs[~context] < 0).all()
            assert (rollout.policy_versions[~context] == 0).all()
            assert rollout.sampled[-1] and rollout.text == rollout.turns[-1].text
            # Context tokens are the text of each observation, after the action that it answers.
            for turn, following in pairwise(rollout.turns):
                ids = rollout.completion_ids[turn.end : following.end]
                mask = rollout.sampled[turn.end : following.end]
                assert (np.diff(mask.astype(int)) >= 0).all() and not mask[0]
                assert len(ids[~mask]) == len(f"\n{turn.observation}\n".encode())


def test_episodes_follow_from_their_seeds_alone(world):
    together = world.run(world.sample_all(PROMPTS))
    alone = [world.run(world.sample(p)) for p in reversed(PROMPTS)][::-1]
    assert all(equal(a, b) for a, b in zip(together, alone, strict=True))
    one = world.run(world.sample(PROMPTS[0], seeds=[3]))
    assert np.array_equal(one[0].completion_ids, together[0][2].completion_ids)
    others = world.run(world.sample_all(PROMPTS, seeds=(5, 6, 7, 8)))
    assert not any(equal(a, b) for a, b in zip(together, others, strict=True))


def test_a_stop_string_ends_an_action_with_the_token_that_completes_it(world):
    """The tokens before it, and their log-probs, match the same request without the stop string."""

    async def session():
        engine, ids = world.rollouts.workers[0], PROMPTS[0].token_ids.tolist()
        whole, text, _ = await engine.generate.remote(ids)
        # Random bytes are rarely characters: take the first plain one after some tokens.
        stop = next(c for i, c in enumerate(text) if i > 3 and 32 < ord(c) < 127 and c not in text[:i])
        return whole, await engine.generate.remote(ids, [stop]), stop

    whole, (cut, text, before), stop = world.run(session())
    count = len(cut.token_ids)
    assert stop in text and stop not in before and count < len(whole.token_ids)
    assert cut.token_ids == whole.token_ids[:count]
    assert np.array_equal(cut.logprobs, whole.logprobs[:count]) and len(cut.versions) == count
    assert cut.finish_reason == "stop"


def test_budgets_end_episodes_on_the_engine(world):
    [cut] = world.run(world.sample(PROMPTS[1], seeds=[1], max_new_tokens=40))
    assert cut.finish_reason == "length" and len(cut.completion_ids) <= 40
    [endless] = world.run(world.sample(prompt("x", turns=100), seeds=[1], max_new_tokens=450))
    assert (endless.finish_reason, len(endless.turns)) == ("turns", 8)
    lengths = world.run(world.sample(PROMPTS[0], seeds=[1, 2], lengths=(3, 5)))
    assert [[int(r.sampled.sum()) for r in lengths], [len(r.turns) for r in lengths]] == [[9, 15], [3, 3]]


def test_a_failed_environment_ends_its_episode_alone(world):
    broken, whole = prompt("a", failing=1), PROMPTS[0]
    failed, fine = world.run(world.sample_all([broken, whole]))
    assert {r.finish_reason for r in failed} == {"error"}
    assert {r.turns[-1].observation for r in failed} == {"the toy is broken"}
    assert {r.finish_reason for r in fine} == {"stop"}


def test_what_came_before_a_turn_is_found_in_the_cache(world):
    """A prompt of 640 tokens, actions of 16 and short answers: only the answer, and what does not fill a
    block of 32 tokens, is computed again.
    """
    world.run(world.usage())
    world.run(world.sample_all([prompt(f"long{i}", tokens=640, turns=5) for i in range(4)]))
    used = world.run(world.usage())
    assert used["turns"] == 4 * 4 * 5
    assert used["later_prompt_tokens"] > 4 * 4 * 4 * 640
    assert used["later_cached_tokens"] / used["later_prompt_tokens"] > 0.9


def test_a_weight_sync_drops_the_cache_of_episodes_that_wait_for_their_tools(world, model):
    """Later turns are sampled from the new weights only: as the trainer computes them, also after tokens that
    old weights sampled.
    """
    long_prompt = prompt("long", tokens=200, turns=2)

    async def session():
        old = await world.move(1)
        await world.push()
        await world.hold()
        sampling = asyncio.create_task(world.sample(long_prompt))
        await world.until_waiting(4, 1)
        await world.usage()
        new = await world.move(2)
        await world.push()
        await world.hold(False)
        return old, new, await sampling, await world.usage()

    old, new, group, used = world.run(session())
    assert used["later_cached_tokens"] <= 3 * 192  # the common prompt, computed again by the first of four
    for rollout in group:
        versions = rollout.policy_versions[rollout.sampled]
        assert set(versions.tolist()) == {world.version - 1, world.version}
        for version, weights in ((world.version - 1, old), (world.version, new)):
            gap = gaps(with_weights(model, weights), long_prompt, rollout)
            assert gap[versions == version].max() < 1e-5
            assert gap[versions != version].max() > 0.01


def test_two_syncs_in_mid_episode_leave_each_token_with_the_version_of_its_weights(world, model):
    """Sync at any moment: some episodes sample, others wait, on one worker during both syncs."""
    prompts = [prompt(f"p{i}", turns=4, seconds=0.02 * i) for i in range(4)]

    async def session():
        weights = {world.version + 1: await world.move(3)}
        await world.push()
        slow_worker = world.environments.workers[1]
        await slow_worker.hold.remote(True)
        running = asyncio.create_task(world.sample_all(prompts, seeds=range(16)))
        while not any((await slow_worker.running.remote()).values()):
            await asyncio.sleep(0.02)
        for seed in (4, 5):
            weights[world.version + 1] = await world.move(seed)
            await world.push()
            await asyncio.sleep(0.3)
        await slow_worker.hold.remote(False)
        return weights, await running

    weights, groups = world.run(session())
    models = {version: with_weights(model, state) for version, state in weights.items()}
    mixed = 0
    for task_prompt, group in zip(prompts, groups, strict=True):
        mixed += sum(len(set(r.policy_versions[r.sampled].tolist())) > 1 for r in group)
        for rollout in group[:6]:
            versions = rollout.policy_versions[rollout.sampled]
            assert (np.diff(versions) >= 0).all() and set(versions.tolist()) <= set(models)
            for version in set(versions.tolist()):
                assert gaps(models[version], task_prompt, rollout)[versions == version].max() < 1e-5
    assert mixed, "no episode was under way; nothing was tested"


@pytest.mark.parametrize("drain", [True, False])
def test_a_paused_engine_waits_for_no_tool_and_its_episodes_continue(world, drain):
    async def session():
        undisturbed = await world.sample(PROMPTS[1])
        engine = world.rollouts.workers[0]
        await world.hold()
        sampling = asyncio.create_task(world.sample(PROMPTS[1]))
        await world.until_waiting(4, 1)
        await engine.pause.remote(drain)  # returns, though all episodes wait
        await world.hold(False)
        await asyncio.sleep(0.3)
        assert not sampling.done()  # the next turns wait for the engine
        await engine.resume.remote()
        return undisturbed, await sampling

    assert equal(*world.run(session()))


def test_abandoned_episodes_end_on_both_sides_also_those_that_wait_for_a_tool(world):
    async def session():
        await world.hold()
        sampling = asyncio.create_task(world.sample(PROMPTS[0]))
        await world.until_waiting(4, 1)
        await world.rollouts.abandon()
        with pytest.raises(Exception, match="the episode was abandoned"):
            await sampling
        while await world.running():
            await asyncio.sleep(0.02)
        await world.hold(False)
        assert world.rollouts.team.is_whole
        return await world.sample(PROMPTS[0])

    assert len(world.run(session())) == 4
