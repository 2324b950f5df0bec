"""Which groups have a signal, by estimator and by a chosen metric."""

from dataclasses import replace

import numpy as np
import pytest

from grpo_dist.batch.signal import SignalRule
from grpo_dist.types import Turn
from tests.support.losses import algorithm
from tests.support.made_groups import group_of

NAN = float("nan")


def parts(**values):
    return {name: np.array(rewards, np.float32) for name, rewards in values.items()}


def with_turns(group, *rewards):
    """Give each sample turns with these rewards."""
    rollouts = [
        replace(r, turns=tuple(Turn(0, i + 1, "", reward=value) for i, value in enumerate(values)))
        for r, values in zip(group.rollouts, rewards, strict=True)
    ]
    return replace(group, rollouts=tuple(rollouts))


def make_rule(advantage="grpo", *, metric=None, weights=None, **settings):
    return SignalRule(algorithm(advantage, **settings), metric, weights or {})


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_pp", "opo", "somebodys:own"])
def test_most_estimators_need_total_rewards_that_differ(estimator):
    rule = make_rule(estimator)
    assert rule(group_of([0, 1], [3, 3]))
    assert not rule(group_of([0.7, 0.7, NAN], [3, 3, 3]))
    assert not rule(group_of([NAN, 1], [3, 3]))


@pytest.mark.parametrize("right", range(9))
@pytest.mark.parametrize("value", [1.0, 0.7])
def test_best_of_k_has_a_signal_where_the_tries_or_the_best_two_differ(right, value):
    """Eight samples: with five right, any four hold a right one; two right samples are equally good."""
    group = group_of([value] * right + [0.0] * (8 - right), [3] * 8)
    assert make_rule("pass_at_k", k=4)(group) == (1 <= right <= 4)
    assert make_rule("pass_at_k", k=2)(group) == (1 <= right <= 6)
    assert make_rule("pass_at_k", k=1)(group) == (1 <= right <= 7)
    assert make_rule("grpo_passk")(group) == (right == 1)
    assert make_rule("grpo")(group) == (1 <= right <= 7)


def test_a_metric_decides_instead_of_the_total_reward():
    both_right = group_of([1.0, 0.8], [3, 9], parts=parts(math=[1, 1], brevity=[0, -0.2]))
    assert make_rule()(both_right)
    assert not make_rule(metric="math")(both_right)
    assert make_rule(metric="brevity")(both_right)


@pytest.mark.parametrize(
    ("rewards", "low", "high", "kept"),
    [
        ([1, 0, 0, 0], 0.2, 0.8, True),
        ([1, 0, 0, 0, 0], 0.2, 0.8, False),  # 0.2 itself is outside
        ([1, 1, 1, 1, 0], 0.2, 0.8, False),
        ([1, 1, 1, 0], None, 0.8, True),
        ([1, 1, 1, 1, 1, 0], None, 0.8, False),
        ([1, 0, 0, 0, 0, 0], 0.2, None, False),
        ([0.2, 0.2, 0.4, 0.0], 0.2, None, False),  # in float32 the rewards are a little larger
        ([NAN, 1, 0, NAN], 0.4, 0.6, True),  # the mean of the scored samples
        ([NAN, NAN], 0.0, None, False),
        ([5, -5], -0.5, 0.5, True),
        ([0.5, 0.5], 0.2, 0.8, False),  # in the range, zero variance
    ],
)
def test_groups_outside_of_a_range_of_mean_reward_have_no_signal(rewards, low, high, kept):
    rule = SignalRule(algorithm("grpo"), mean_low=low, mean_high=high)
    assert rule(group_of(rewards, [3] * len(rewards))) == kept


def test_the_range_applies_to_the_metric_or_to_the_clipped_reward():
    """Three of four right, with a penalty: means 0.75 (math) and -1.25 (reward); clipped to 0.5: 0.25."""
    group = group_of([1, 1, 1, -8], [3] * 4, parts=parts(math=[1, 1, 1, 0]))
    rule = SignalRule(algorithm("grpo"), "math", mean_low=0.7, mean_high=0.8)
    assert rule(group) and not replace(rule, mean_high=0.75)(group)
    clipped = SignalRule(algorithm("grpo", reward_clip=0.5), mean_low=0.2, mean_high=0.3)
    assert clipped(group) and not replace(clipped, algorithm=algorithm("grpo"))(group)


def test_accuracy_comes_from_the_grader_or_else_from_a_reward_above_a_half():
    graded = replace(group_of([0.9, 0.6], [3, 3]), outcomes=("correct", "no_answer"))
    assert make_rule(metric="accuracy")(graded)
    assert not make_rule(metric="accuracy")(replace(graded, outcomes=("correct", "correct")))
    assert not make_rule(metric="accuracy")(group_of([0.9, 0.6], [3, 3]))
    assert make_rule(metric="accuracy")(group_of([0.9, 0.4], [3, 3]))
    named = group_of([1, 1], [3, 3], parts=parts(accuracy=[0, 1]))
    assert make_rule(metric="accuracy")(named)  # a reward of that name takes precedence


def test_an_untrainable_sample_is_no_part_of_the_signal():
    group = group_of([1, NAN], [3, 3], parts=parts(math=[1, 0], judge=[0, NAN]))
    assert not make_rule(metric="math")(group)


def test_a_group_without_the_chosen_reward_is_judged_by_its_total():
    group = group_of([0, 1], [3, 3], parts=parts(judge=[0, 1]))
    assert make_rule(metric="math")(group)


def test_gdpo_needs_any_weighted_reward_to_differ_even_if_the_totals_are_equal():
    group = group_of([1, 1], [3, 3], parts=parts(a=[1, 0], b=[0, 1], c=[2, 3]))
    assert make_rule("gdpo", weights={"a": 1.0, "b": 1.0, "c": 0.0})(group)
    assert not make_rule("gdpo", weights={"a": 0.0, "b": 0.0, "c": 0.0})(group)
    assert not make_rule("gdpo", weights={"a": 1.0})(replace(group, reward_parts=parts(a=[1, 1])))


def test_process_needs_step_rewards_that_differ():
    steps = (np.array([0.5, 0.5], np.float32), np.array([0.5], np.float32))
    ends = (np.array([0, 2], np.int32), np.array([2], np.int32))
    equal = replace(group_of([0, 1], [3, 3]), step_rewards=steps, step_ends=ends)
    assert not make_rule("process")(equal)
    other = (steps[0], np.array([0.25], np.float32))
    assert make_rule("process")(replace(equal, step_rewards=other))
    alike = replace(equal, rewards=np.ones(2, np.float32), step_rewards=other)
    assert not make_rule("grpo")(alike) and make_rule("grpo", process={})(alike)
    unscored = group_of([0, NAN], [3, 3])
    assert not make_rule("process")(replace(unscored, step_rewards=other, step_ends=ends))
    assert make_rule("process")(with_turns(group_of([1, 1], [3, 3]), [0.0], [0.5]))


def test_turn_level_needs_returns_of_one_turn_that_differ():
    same = group_of([1, 1], [3, 3])
    assert make_rule("turn")(with_turns(same, [0.5, 0.0], [0.0, 0.0]))
    assert not make_rule("turn")(with_turns(same, [0.5], [0.5]))
    # The first turn returns 1.5 in both, and only one sample has a second turn. A discount makes them differ.
    assert not make_rule("turn")(with_turns(same, [0.0, 0.5], [0.5]))
    assert make_rule("turn", discount=0.5)(with_turns(same, [0.0, 0.5], [0.5]))


def test_remax_compares_with_the_greedy_answer():
    group = group_of([0.7, 0.7], [3, 3], baseline_reward=0.7)
    assert not make_rule("remax")(group)  # float32(0.7) counts as 0.7
    assert make_rule("remax")(replace(group, baseline_reward=0.0))


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "opo", "pass_at_k", "somebodys:own"])
def test_rewards_are_compared_as_the_estimator_sees_them_clipped(estimator):
    rule = make_rule(estimator, k=1, reward_clip=1.0)
    assert not rule(group_of([2, 3], [3, 3])) and not rule(group_of([-2, NAN, -3], [3, 3, 3]))
    assert rule(group_of([-2, 3], [3, 3])) and rule(group_of([0.5, 3], [3, 3]))
    assert make_rule(estimator, k=1)(group_of([2, 3], [3, 3]))


def test_remax_compares_clipped_rewards_with_the_clipped_greedy_reward():
    group = group_of([3, 3], [3, 3], baseline_reward=2.0)
    assert not make_rule("remax", reward_clip=1.0)(group) and make_rule("remax")(group)
    assert make_rule("remax", reward_clip=2.5)(group)


def test_a_chosen_metric_is_not_clipped():
    group = group_of([2, 2], [3, 3], parts=parts(math=[2, 3]))
    assert make_rule(reward_clip=1.0, metric="math")(group)
    assert not make_rule(reward_clip=1.0, metric="absent")(group)  # falls back to the total reward
