"""verl#6857, "fix seed collisions in deterministic GRPO rollouts": seeds were numbered within each worker's
part of the batch, so samples of one prompt in two parts had the same seed, and were the same sample.
ms-swift#7219 and ms-swift#3450 report groups with identical completions.

A group of equal samples has equal rewards, and teaches nothing.
"""

from collections import Counter

import pytest

from grpo_dist.evaluation.sampling import EvalSet
from grpo_dist.runtime.seeds import request_seed, turn_seed
from tests.support import fakes
from tests.support.fakes import train

SAMPLES, PARTS = 8, 2


def seeds_of_the_bug(base, step):
    """Hash (step, prompt, index of the sample in its part) for one prompt with samples in two parts."""
    return [hash((base, step, 0, i % (SAMPLES // PARTS))) for i in range(SAMPLES)]


def test_the_bug_samples_half_of_a_group_twice():
    assert len(set(seeds_of_the_bug(0, 1))) == SAMPLES / 2


def test_seeds_of_a_run_are_all_different():
    """Over all steps, prompts, samples, evaluations, and turns of episodes."""
    seeds = [
        request_seed(0, step, f"p{i}", sample)
        for step in (-2, -1, 0, 1, 2)
        for i in range(50)
        for sample in range(SAMPLES)
    ]
    turns = [turn_seed(seed, number) for seed in seeds[:500] for number in range(5)]
    assert len(set(seeds)) == len(seeds) and len(set(turns)) == len(turns)
    assert all(0 <= seed < 2**63 for seed in [*seeds, *turns])


@pytest.mark.parametrize("staleness", [0, 2])
def test_no_request_of_the_loop_has_the_seed_of_another(staleness):
    batch = {"prompts_per_step": 4, "samples_per_prompt": SAMPLES}
    evaluation = {"before": True, "after": False, "every": 2, "samples_per_prompt": 3}
    config = fakes.config(steps=6, max_staleness=staleness, batch=batch, evaluation=evaluation)
    prompts = fakes.prompts(12)  # two epochs: a repeated prompt has other samples
    world = train(fakes.World(), config, prompts, eval_sets=[EvalSet("held", fakes.prompts(3))])
    training = [(uid, seed) for uid, seeds, _ in world.sampled if len(seeds) == SAMPLES for seed in seeds]
    assert len(training) == 6 * 4 * SAMPLES
    counts = Counter(seed for _, seed in training)
    assert max(counts.values()) == 1
    held_out = Counter(seed for _, seeds, _ in world.sampled if len(seeds) == 3 for seed in seeds)
    assert not set(held_out) & set(counts)
    assert set(held_out.values()) == {4}  # the same at each of the four evaluations, on purpose


def test_another_seed_of_the_run_gives_other_samples():
    assert request_seed(0, 1, "p0", 0) != request_seed(1, 1, "p0", 0)
