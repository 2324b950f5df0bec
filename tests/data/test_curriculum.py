"""Draws by pass rate: in proportion to p (1 - p), without repeats, deterministic in seed and step."""

from collections import Counter

import numpy as np
import pytest

from grpo_dist.data.curriculum import Curriculum
from tests.support.made_groups import group_of

UIDS = ["always", "never", "half", "new"]


def seen(uid, right, scored=16):
    made = group_of([0.0] * scored, [1] * scored)
    outcomes = ("correct",) * right + ("wrong",) * (scored - right)
    object.__setattr__(made.prompt, "uid", uid)
    object.__setattr__(made, "outcomes", outcomes)
    return made


def test_prompts_are_drawn_in_proportion_to_their_learning_signal():
    curriculum = Curriculum(UIDS, 1, seed=0, rates={})
    for _ in range(6):
        curriculum.trained([], [seen("always", 16), seen("never", 0), seen("half", 8)])
    rates = curriculum.state.pass_rates
    assert rates["half"][0] / rates["half"][1] == 0.5
    assert rates["never"] == (0.0, pytest.approx(16 * (2 - 0.5**5)))
    counts = Counter(UIDS[curriculum.take(step)[0]] for step in range(4000))
    share = 1 / (rates["never"][1] + 2)
    rare = share * (1 - share)
    total = 0.25 + 0.25 + 2 * rare
    for uid, weight in (("always", rare), ("never", rare), ("half", 0.25), ("new", 0.25)):
        expected = weight / total
        assert counts[uid] / 4000 == pytest.approx(expected, abs=4 * np.sqrt(expected / 4000))


def test_a_draw_repeats_and_holds_no_prompt_twice():
    first, second = (Curriculum([f"p{i}" for i in range(9)], 5, seed=3, rates={}) for _ in range(2))
    draws = [first.take(step) for step in range(20)]
    assert draws == [second.take(step) for step in range(20)]
    assert all(len(set(draw)) == 5 for draw in draws)
    assert len({tuple(draw) for draw in draws}) > 10


def test_unscored_samples_do_not_count_and_old_observations_decay():
    curriculum = Curriculum(UIDS, 1, seed=0, rates={"half": (4.0, 8.0)})
    unscored = seen("half", 2, scored=4)
    object.__setattr__(unscored, "outcomes", ("correct", "timeout", "error", "wrong"))
    curriculum.trained([], [unscored])
    assert curriculum.state.pass_rates["half"] == (2.0 + 1.0, 4.0 + 2.0)
