"""miles#2800, "drop infra-aborted samples per sample (refill) instead of per group", and NeMo-RL#3470: a
sample whose sandbox or engine had failed was trained with reward 0, or its whole group was dropped. The
thread computes the cost: with 5 % failures and groups of 8, 1 - 0.95^8, a third of all samples.
"""

import numpy as np
import pytest

from grpo_dist.batch.credit_assignment import sample_advantages
from grpo_dist.batch.rows import make_batch
from grpo_dist.evaluation.result import JudgedProblem, Verdict
from grpo_dist.rewards.group import describe_failure
from grpo_dist.rewards.scorer import combine
from grpo_dist.types import Group
from tests.support import fakes
from tests.support.fakes import train
from tests.support.losses import credit
from tests.support.made_completions import term
from tests.support.made_groups import group_of

RIGHT, WRONG, FAILED = 1.0, 0.0, float("nan")
REWARDS = [RIGHT, FAILED, RIGHT, WRONG]
ESTIMATORS = ["grpo", "dr_grpo", "rloo", "opo", "reinforce_pp_baseline"]


def advantages(rewards, estimator="dr_grpo"):
    group = group_of(rewards, [3] * len(rewards))
    (result,) = sample_advantages([group], credit(estimator))
    return result


def test_the_bug_lowers_the_baseline_of_the_others_and_blames_the_sample():
    as_zero = advantages([0.0 if np.isnan(r) else r for r in REWARDS])
    assert as_zero.tolist() == [0.5, -0.5, 0.5, -0.5]  # [1, 0, 1, 0] has mean 1/2
    lost = 1 - 0.95**8  # share of groups dropped
    assert lost == pytest.approx(0.337, abs=1e-3)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_others_have_the_advantages_of_a_group_without_it(estimator):
    result = advantages(REWARDS, estimator)
    np.testing.assert_allclose(result[[0, 2, 3]], advantages([RIGHT, RIGHT, WRONG], estimator), rtol=1e-6)
    assert result[1] == 0 and result[0] > 0 > result[3]


def test_one_sample_is_lost_and_not_its_group():
    group = group_of(REWARDS, [3] * 4)
    batch = make_batch([group], [advantages(REWARDS)], ref_logprobs=None, max_new_tokens=3)
    assert batch.policy.mask.any(dim=1).tolist() == [True, False, True, True]
    assert (batch.denominators.tokens, batch.denominators.sequences) == (9, 3)


def test_a_failed_environment_is_named_and_never_trained_on_whatever_its_reward():
    assert describe_failure([{"observation": "no server"}]) == "no server"
    group = group_of([RIGHT, WRONG], [3, 3], reasons=["stop", "error"])
    batch = make_batch([group], [advantages([RIGHT, WRONG])], ref_logprobs=None, max_new_tokens=3)
    assert batch.policy.mask.any(dim=1).tolist() == [True, False]


def test_a_part_that_could_not_be_scored_makes_a_reward_that_is_unknown_and_not_lower():
    parts = {"math": np.array([1.0, np.nan, 0.0]), "format": np.array([1.0, 1.0, 1.0])}
    rewards = combine(parts, [term("math"), term("format", weight=0.5)])
    np.testing.assert_array_equal(rewards, np.array([1.5, np.nan, 0.5], np.float32))


def test_an_evaluation_leaves_it_out_of_its_accuracy():
    group = group_of([RIGHT, FAILED, RIGHT, RIGHT], [3] * 4)
    judged = JudgedProblem.from_verdict("set", group.prompt, {}, Verdict.from_group(group), (1,))
    assert judged.values["pass@1"] == 1
    assert np.nan_to_num(group.rewards).mean() == 0.75  # with 0 for the failure


def test_the_run_counts_it_apart_from_wrong_answers():
    world = fakes.World(jitter=False)

    async def score(prompt, rollouts):
        rewards = np.array(REWARDS, np.float32)
        return Group(prompt, rollouts, rewards, {"fake": rewards}, ("correct", "error", "correct", "wrong"))

    world.score = score
    batch = {"prompts_per_step": 4, "samples_per_prompt": 4}
    train(world, fakes.config(steps=1, batch=batch), fakes.prompts(8))
    metrics = world.logged[1]
    assert metrics["reward/unscored"] == 4 and metrics["reward/mean"] == pytest.approx(2 / 3)
    assert metrics["outcome/error"] == 4 and metrics["outcome/wrong"] == 4
    (update,) = world.updates[0]
    assert update.denominators.sequences == 12
