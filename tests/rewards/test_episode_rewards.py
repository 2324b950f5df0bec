"""Rewards of episodes: the turns that functions see, sums of environment rewards, and outcome rewards."""

from dataclasses import replace

import numpy as np
import pytest

from grpo_dist.rewards.group import CompletionGroup, sum_of_turns
from grpo_dist.rewards.pool import GraderPool
from grpo_dist.rewards.scorer import Scorer
from grpo_dist.types import Prompt, Rollout, ToolCall, Turn
from tests.support import made_groups
from tests.support.made_completions import completion_group, spec
from tests.support.patience import HANG_S
from tests.support.reward_code import code_directory

NAN = float("nan")
CODE = """
def calls(completion, turns):
    assert turns[0]["action"] == "first" and turns[0]["observation"] == "6", turns
    (call,) = turns[0]["calls"]
    assert call == {"name": "calculator", "arguments": "2*3", "result": "6", "outcome": "ok", "seconds": 0.5}
    return float(sum(len(turn["calls"]) for turn in turns)) + (turns[1]["reward"] or 0.0)

def none_of(completion, turns=None):
    return float(turns is None)

def everything(completion, **others):
    return float(len(others))
"""
code = code_directory(episode_rewards=CODE)


@pytest.fixture(scope="module")
def pool(code):
    with GraderPool(2, timeout_s=HANG_S, code_paths=[code]) as pool:
        yield pool


PROMPT = Prompt("p", np.array([1, 2], np.int32), "6", "made", "2*3?")


def episode(sample, text, *rewards, reason="stop", observation=""):
    """Return an episode whose first turn calls the calculator; tokens: sampled, given, given, sampled."""
    call = ToolCall("calculator", "2*3", "6", "ok", 0.5)
    turns = (Turn(0, 1, "first", "6", (call,), rewards[0]), Turn(0, 4, text, observation, (), rewards[1]))
    sampled = np.array([True, False, False, True])
    numbers = np.zeros(4, np.float32)
    return Rollout("p", sample, np.array([5, 6, 7, 8], np.int32), numbers, reason, text,
                   np.array([0, -1, -1, 0], np.int32), sampled, turns)  # fmt: skip


def episode_group(*rollouts):
    return CompletionGroup.from_rollouts(PROMPT, rollouts, max_new_tokens=100)


def test_a_function_that_names_turns_gets_the_whole_episode(pool):
    scores = Scorer([spec("calls", "episode_rewards:calls")], pool).score(
        episode_group(episode(0, "\\boxed{6}", None, 0.25), episode(1, "\\boxed{7}", None, None))
    )
    assert scores.rewards.tolist() == [1.25, 1.0]


def test_without_an_environment_no_function_is_given_turns(pool):
    specs = [spec("n", "episode_rewards:none_of"), spec("e", "episode_rewards:everything", 10.0)]
    assert Scorer(specs, pool).score(completion_group(["a"], "6")).rewards.tolist() == [11.0]  # the answer


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [((1.0, 0.5), 1.5), ((None, 0.5), 0.5), ((None, None), NAN), ((1.0, NAN), NAN), ((), NAN), ((0.0,), 0.0)],
)
def test_the_environments_reward_sums_the_turns_that_have_one(rewards, expected):
    assert sum_of_turns([{"reward": r} for r in rewards]) == pytest.approx(expected, nan_ok=True)


def test_the_environments_reward_leaves_samples_without_one_unscored(pool):
    scorer = Scorer([spec("environment", "environment", 2.0)], pool)
    scores = scorer.score(episode_group(episode(0, "", 1.0, 0.5), episode(1, "", None, None)))
    np.testing.assert_array_equal(scores.rewards, [3.0, NAN])
    assert np.isnan(scorer.score(completion_group(["a", "b"], "6")).rewards).all()


@pytest.mark.slow
def test_ends_of_episodes_are_rewarded_after_the_sum_and_of_episodes_alone(pool):
    scorer = Scorer([spec("math", "math", 2.0)], pool, outcome_rewards={"turns": -0.5, "length": -1.0})
    right = "\\boxed{6}"
    group = episode_group(
        episode(0, right, None, None, reason="turns"),
        episode(1, right, None, None, reason="stop"),
        episode(2, "\\boxed{7}", None, None, reason="length"),
    )
    assert scorer.score(group).rewards.tolist() == [1.5, 2.0, -1.0]
    (cut,) = made_groups.group_of([0], [3], reasons=["length"]).rollouts
    assert scorer.score(episode_group(replace(cut, text=right))).rewards.tolist() == [2.0]


def test_an_end_is_rewarded_where_the_environment_gave_no_reward_before_it(pool):
    group = episode_group(
        episode(0, "", None, None, reason="turns"),
        episode(1, "", None, None, reason="length"),
        episode(2, "", None, NAN, reason="turns"),
        episode(3, "", 0.25, None, reason="turns"),
        episode(4, "", None, None, reason="stop"),
        episode(5, "", None, None, reason="error", observation="down"),
    )
    scorer = Scorer([spec("environment", "environment", 2.0)], pool, outcome_rewards={"turns": -0.5})
    scores = scorer.score(group)
    np.testing.assert_array_equal(scores.rewards, [-0.5, NAN, NAN, 0.0, NAN, NAN])
    np.testing.assert_array_equal(scores.parts["environment"], [0.0, NAN, NAN, 0.25, NAN, NAN])


def test_an_episode_whose_environment_failed_is_not_scored_and_never_0(pool):
    failed = episode(0, "\\boxed{6}", 1.0, None, reason="error", observation="the service is down")
    right = episode(1, "\\boxed{6}", 1.0, None)
    scorer = Scorer([spec("math", "math"), spec("environment", "environment", 0.5)], pool)
    scores = scorer.score(episode_group(failed, right))
    np.testing.assert_array_equal(scores.rewards, [NAN, 1.5])
    np.testing.assert_array_equal(scores.parts["math"], [NAN, 1.0])
    assert scores.outcomes == ["error", "correct"]
    assert scorer.news() == ("reward environment: the service is down",)
    # Without a math grader no sample has an outcome: one alone would make the others look ungraded.
    alone = Scorer([spec("environment", "environment")], pool).score(episode_group(failed, right))
    assert alone.outcomes == ["", ""] and np.isnan(alone.rewards[0]) and alone.rewards[1] == 1.0


def test_lengths_count_given_tokens_and_repetition_and_relative_length_only_sampled_ones(pool):
    group = episode_group(episode(0, "a", None, None), episode(1, "b", None, None))
    assert group.lengths == [4, 4]
    assert [ids.tolist() for ids in group.token_ids] == [[5, 8], [5, 8]]
    scores = Scorer([spec("overlong", "overlong", kwargs={"buffer_tokens": 100})], pool).score(group)
    np.testing.assert_allclose(scores.rewards, -0.04, rtol=1e-6)
