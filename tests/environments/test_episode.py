"""The loop of one episode, with a scripted engine and environment."""

import asyncio

import numpy as np
import pytest

from grpo_dist.config import EnvironmentsConfig
from grpo_dist.environments.dialogue import Budgets, play
from grpo_dist.environments.episode import Action, Call, Generation, Observed
from grpo_dist.runtime.seeds import turn_seed

PROMPT = [7, 8]
CALL, UNFINISHED = 50, 60  # tokens that mark the kind of an action
DONE, FAILED = Observed(done=True), Observed(failed="no server")


class Rows:
    """Token rows of an episode in which every answer is a number of given tokens."""

    def __init__(self):
        self.context, self.observed = list(PROMPT), []

    @property
    def used(self):
        return len(self.context) - len(PROMPT)

    def add_action(self, sampled):
        ids = sampled.token_ids
        self.context += ids
        calls = tuple(Call("f", "{}") for token in ids if token == CALL)
        return Action(str(ids), calls, unfinished=ids[-1] == UNFINISHED)

    def observe(self, observed):
        self.observed.append(observed)
        self.context += [0] * len(observed.observation)


class Scripted:
    """An engine that samples ``actions`` in order, each cut to what it may sample, and an environment that
    gives ``answers``.
    """

    def __init__(self, actions, answers):
        self.actions, self.answers = list(actions), list(answers)
        self.requests, self.acted = [], []

    async def generate(self, token_ids, seed, max_tokens):
        assert max_tokens > 0
        self.requests.append((token_ids, seed, max_tokens))
        ids = self.actions.pop(0)
        cut = len(ids) > max_tokens
        ids = ids[:max_tokens]
        zeros = np.zeros(len(ids), np.float32)
        return Generation(ids, zeros, zeros.astype(np.int32), "length" if cut else "stop")

    async def act(self, action, turn):
        self.acted.append((action.text, turn))
        return self.answers.pop(0)


def play_episode(actions, answers, *, tokens=100, turns=8, turn_tokens=None, tool_calls=None, seed=5):
    rows, parts = Rows(), Scripted(actions, answers)
    budgets = Budgets(tokens, turns, turn_tokens, tool_calls)
    reason = asyncio.run(play(rows, parts, budgets, seed=seed))
    return reason, rows, parts


def test_the_environment_ends_an_episode_and_each_turn_reads_all_before_it():
    reason, rows, parts = play_episode([[1, 2], [3]], [Observed("ab"), DONE])
    assert reason == "stop"
    assert [context for context, *_ in parts.requests] == [[7, 8], [7, 8, 1, 2, 0, 0]]
    assert parts.acted == [("[1, 2]", 0), ("[3]", 1)]
    assert rows.context == [7, 8, 1, 2, 0, 0, 3]
    assert rows.observed == [Observed("ab"), DONE]


def test_a_failed_environment_is_an_error_and_no_end_by_the_policy():
    reason, rows, _ = play_episode([[1], [2]], [Observed("a"), FAILED])
    assert reason == "error"
    assert rows.observed[-1] is FAILED  # with its reason, for the record


def test_the_last_turn_is_answered_since_it_may_end_the_episode_well():
    actions = [[1], [2], [3]]
    assert play_episode(actions, [Observed("a"), Observed("b"), DONE], turns=3)[0] == "stop"
    reason, _, parts = play_episode(actions, [Observed("a"), Observed("b"), Observed("c")], turns=3)
    assert (reason, len(parts.acted)) == ("turns", 3)


def test_the_call_beyond_the_limit_ends_the_episode_and_is_not_run():
    actions = [[CALL, CALL], [1], [CALL, CALL]]
    reason, _, parts = play_episode(actions, [Observed("a")] * 2, tool_calls=3)
    assert reason == "tool_limit"
    assert parts.acted == [("[50, 50]", 0), ("[1]", 1)]  # the third and fourth calls never ran
    assert play_episode(actions, [Observed("a"), Observed("a"), DONE], tool_calls=4)[0] == "stop"


@pytest.mark.parametrize("size", [3, 4])
def test_tokens_of_policy_and_environment_count_and_an_answer_that_leaves_none_ends_the_episode(size):
    """Four sampled, then three or four given, of eight: one is left for the second action, or none."""
    reason, _, parts = play_episode([[1, 2, 3, 4], [5, 6]], [Observed("x" * size)], tokens=8)
    assert reason == "length"
    assert [limit for *_, limit in parts.requests] == ([8, 1] if size == 3 else [8])
    assert len(parts.acted) == 1  # an action that was cut at the end of the episode is no action


def test_an_action_that_ends_with_the_last_token_is_answered():
    assert play_episode([[1, 2, 3, 4]], [DONE], tokens=4)[0] == "stop"
    assert play_episode([[1, 2, 3, 4]], [Observed("a")], tokens=4)[0] == "length"


def test_an_action_cut_at_the_tokens_of_a_turn_is_read_as_it_is():
    reason, _, parts = play_episode([[1, 2, 3, 4], [5]], [Observed("a"), DONE], turn_tokens=3)
    assert reason == "stop"
    assert parts.acted == [("[1, 2, 3]", 0), ("[5]", 1)]
    assert [limit for *_, limit in parts.requests] == [3, 3]


def test_an_unfinished_action_continues_within_its_turn_and_its_tokens():
    """The stop string of a code block ended it, but the block was no call."""
    reason, _, parts = play_episode([[1, UNFINISHED], [2]], [DONE], turn_tokens=10)
    assert reason == "stop"
    assert [(context, limit) for context, _, limit in parts.requests] == [
        ([7, 8], 10), ([7, 8, 1, UNFINISHED], 8),
    ]  # fmt: skip
    assert parts.acted == [("[2]", 0)]
    cut = play_episode([[1, UNFINISHED], [2, UNFINISHED]], [DONE], turn_tokens=4)
    assert (cut[0], len(cut[2].acted)) == ("stop", 1)
    assert play_episode([[1, UNFINISHED]], [], tokens=2)[0] == "length"


def test_each_request_has_its_own_seed_that_follows_from_the_episodes_alone():
    actions, answers = [[1], [2, UNFINISHED], [3]], [Observed("a"), DONE]
    seeds = [seed for _, seed, _ in play_episode(actions, answers, seed=5)[2].requests]
    assert seeds == [5, turn_seed(5, 1), turn_seed(5, 2)]
    assert len(set(seeds) | {turn_seed(6, 1)}) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_budgets_come_from_the_configuration():
    settings = EnvironmentsConfig(max_turns=3, max_turn_tokens=40, max_tool_calls=2)
    assert Budgets.from_config(settings, tokens=200) == Budgets(200, 3, 40, 2)
