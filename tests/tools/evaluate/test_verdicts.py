"""Votes of samples that think: the final answer decides, not a guess within the thought."""

from dataclasses import replace

import numpy as np
import pytest

from grpo_dist.config import RewardsConfig
from grpo_dist.evaluation.votes import majority_at_k
from grpo_dist.rewards.pool import GraderPool
from grpo_dist.tools.evaluate.result import make_verdict
from grpo_dist.types import Group, Rollout, Thought, Turn
from tests.support import fakes
from tests.support.patience import HANG_S


@pytest.mark.parametrize("closing", ["</think>", "</reasoning>"])
def test_samples_vote_with_their_final_answer_and_not_a_guess_in_the_thought(closing):
    """Two samples of five are right, and three agree on 7: the vote is lost."""
    texts = [f"maybe \\boxed{{{n}}}{closing}The answer is 7." for n in (3, 4)]
    texts += ["\\boxed{7}", f"maybe \\boxed{{7}}{closing}It is \\boxed{{8}}.", "\\boxed{8}"]
    right = np.array([0, 0, 0, 1, 1], np.float32)
    prompt = replace(fakes.prompts(1)[0], answer="8", thought=Thought(closing.replace("/", ""), closing))
    ids, logprobs, versions = np.array([1], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32)
    rollouts = tuple(
        Rollout(prompt.uid, i, ids, logprobs, "stop", text, versions) for i, text in enumerate(texts)
    )
    outcomes = tuple("correct" if flag else "wrong" for flag in right)
    with GraderPool(1, timeout_s=HANG_S) as pool:
        group = Group(prompt, rollouts, right, {"math": right}, outcomes)
        verdict = make_verdict(group, RewardsConfig(), pool)
    assert verdict.answers == ["7", "7", "7", "8", "8"] and verdict.numbers == [0, 0, 0, 3, 3]
    assert majority_at_k(verdict.flags, verdict.numbers, 5) == 0.0


def test_an_episode_votes_only_after_the_thought_that_its_message_opened():
    """The last action begins in the middle of a message, in the first sample within its thought."""
    prompt, text, none = fakes.prompts(1)[0], "maybe \\boxed{7}", np.zeros(1, np.int32)
    rollouts = tuple(
        Rollout(prompt.uid, i, none, none.astype(np.float32), "stop", text, none,
                turns=(Turn(0, 1, text, thought=part),))
        for i, part in enumerate(("opens", "closes"))
    )  # fmt: skip
    wrong = np.zeros(2, np.float32)
    with GraderPool(1, timeout_s=HANG_S) as pool:
        group = Group(prompt, rollouts, wrong, {"math": wrong}, ("wrong", "wrong"))
        assert make_verdict(group, RewardsConfig(), pool).answers == ["", "7"]
