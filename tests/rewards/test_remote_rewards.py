"""Rewards from a server, here a fake one: whole groups, deadlines, the breaker, replies and secrets."""

import math
import re
import time

import numpy as np
import pytest

from grpo_dist.rewards.scorer import Scorer
from grpo_dist.rewards.served import Generative, read_scores
from tests.support.made_completions import check_reward, completion_group, scored, spec
from tests.support.patience import HANG_S
from tests.support.services import StandIn, after, failing, replied


def rewards_of(pool, function, group, **kwargs):
    scores, scorer = scored(pool, group, spec("served", function, kwargs=kwargs))
    return scores.rewards, scorer


def test_a_group_is_one_request_with_what_the_server_may_need(pool):
    group = completion_group(
        ["1", "2"], "2", columns={"problem": "1+1", "level": 3, "other": "x"}, lengths=[2, 3],
        reasons=["stop", "length"],
    )  # fmt: skip
    with StandIn(lambda body, number: replied({"scores": [0.5, None]})) as server:
        rewards, scorer = rewards_of(
            pool, "remote", group, url=server.base_url, columns=["level"], send_token_ids=True
        )
    np.testing.assert_array_equal(rewards, [0.5, np.nan])
    assert scorer.failures == {}  # null is intended
    assert server.requests == [
        {
            "problem": "1+1", "answer": "2", "completions": ["1", "2"], "finish_reasons": ["stop", "length"],
            "source": "", "columns": {"level": 3}, "token_ids": [[0, 1], [0, 1, 2]],
        }
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ({"scores": [1]}, "1 scores for 2 completions"), ({"scores": "11"}, "expected"),
        ({"scores": [1, "2"]}, "a score is '2', no number"), ({"detail": "x"}, "expected"), (3, "expected"),
    ],
)  # fmt: skip
def test_a_reply_that_is_not_one_score_each_scores_nothing(pool, reply, words):
    with StandIn(lambda body, number: replied(reply)) as server:
        rewards, scorer = rewards_of(pool, "remote", completion_group(["a", "b"], ""), url=server.base_url)
    assert np.isnan(rewards).all()
    assert [words in reason for reason in scorer.failures["served"]] == [True]


def test_scores_may_be_a_list_or_named_rewards():
    assert read_scores([1, 0.5], 2) == read_scores({"rewards": [1, 0.5]}, 2) == [1.0, 0.5]
    assert read_scores([10**400], 1) == [math.inf]


def test_secrets_are_masked_in_reasons_and_refusals(pool, monkeypatch):
    monkeypatch.setenv("SCORER_KEY", "s3cretkey")
    reply = failing(401)[0], b'{"error": {"message": "s3cretkey and t0ken and pa55 are wrong"}}', {}
    with StandIn(lambda body, number: reply) as server:
        kwargs = {"url": f"{server.base_url}?token=pa55", "headers": {"X-Api-Key": "t0ken"}}
        kwargs |= {"api_key_env": "SCORER_KEY"}
        _, scorer = rewards_of(pool, "remote", completion_group(["a"], ""), **kwargs)
        with pytest.raises(ValueError) as refusal:
            check_reward("remote", **kwargs)
    assert {h["authorization"] for h in server.headers} == {"Bearer s3cretkey"}
    assert {h["x-api-key"] for h in server.headers} == {"t0ken"}
    (reason,) = scorer.failures["served"]
    for text in (reason, str(refusal.value)):
        assert "*** and *** and *** are wrong" in text
        assert not any(secret in text for secret in ("s3cretkey", "t0ken", "pa55"))


def test_a_server_is_tried_before_the_run_and_may_refuse_the_trial():
    with StandIn(lambda body, number: failing(422)) as server:
        kwargs = {"url": server.base_url, "max_retries": 0}
        check_reward("remote", **kwargs)  # the server may not know the problem of the check
    with pytest.raises(ValueError, match=r"kwargs\.url = http.* does not reply \(ConnectError"):
        check_reward("remote", **kwargs)


@pytest.mark.parametrize("status", [307, 404, 503])
def test_a_server_that_moved_or_has_nothing_behind_it_is_refused_before_the_run(status):
    words = rf"does not reply \(HTTP {status}"
    with StandIn(lambda body, _: failing(status)) as server, pytest.raises(ValueError, match=words):
        check_reward("remote", url=server.base_url, max_retries=0)


def test_a_generative_model_is_asked_once_about_each_completion(pool):
    replies = {"good": "Score: 3, no, Score: 10", "bad": "rating 0", "odd": "no idea", "high": "Score: 11"}

    def reply(body, number):
        return replies[body["messages"][-1]["content"].rpartition("Response:\n")[2]]

    texts = ["good", "bad", "good", "odd", "high"]
    with StandIn(reply) as server:
        rewards, scorer = rewards_of(
            pool, "generative", completion_group(texts, "2", columns={"problem": "1+1"}),
            base_url=server.base_url, model="m", system="Be strict.",
        )  # fmt: skip
    np.testing.assert_array_equal(rewards, [1.0, 0.0, 1.0, np.nan, np.nan])
    assert len(server.requests) == 4
    assert server.requests[0]["messages"][0] == {"role": "system", "content": "Be strict."}
    assert "Problem:\n1+1\n\nReference answer:\n2" in server.requests[0]["messages"][1]["content"]
    assert sorted(reason[:9] for reason in scorer.failures["served"]) == ["no score ", "score 11 "]


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("Score: 7", "7"), ("**Score:** 7/10", "7"), ("score = 7.5.", "7.5"), ("Score: `7`", "7"),
        ("Score:\n\n7", "7"), ("Rating - 7", "7"), ("Score (7)", "7"), ("Score: [7]", "7"),
        ("Score: -7", "-7"), ("Score: .7", ".7"),
        ("Score (0-10): 7", "7"), ("**Score** (out of 10): 7", "7"), ("Score (0-10): unsure", None),
    ],
)  # fmt: skip
def test_the_number_behind_the_word_is_the_score(reply, score):
    """The number includes its sign and decimal point, but not a scale in parentheses."""
    matches = [match[1] for match in re.finditer(Generative.model_fields["pattern"].default, reply)]
    assert matches == ([] if score is None else [score])


def test_a_reply_on_which_the_pattern_hangs_is_not_scored(pool, monkeypatch):
    monkeypatch.setattr("grpo_dist.rewards.served.PATTERN_S", 1.0)
    with StandIn(lambda body, number: "score " + "a" * 400) as server:
        rewards, scorer = rewards_of(
            pool, "generative", completion_group(["x"], ""), base_url=server.base_url, model="m",
            prompt="{completion}", pattern=r"score ((?:a|aa)+)b", verdicts={"a": 1.0},
        )  # fmt: skip
    np.testing.assert_array_equal(rewards, [np.nan])
    (reason,) = scorer.failures["served"]
    assert "kwargs.pattern does not finish within 1 s on a reply of 406 characters" in reason


def test_verdicts_of_a_generative_model_have_values(pool):
    replies = {"a": "VERDICT yes", "b": "verdict yes? The last counts: verdict No", "c": "verdict maybe"}
    with StandIn(lambda body, number: replies[body["messages"][0]["content"]]) as server:
        rewards, _ = rewards_of(
            pool, "generative", completion_group(["a", "b", "c"], ""), base_url=server.base_url, model="m",
            prompt="{completion}", pattern=r"(?i)verdict (\w+)", verdicts={"yes": 1.0, "no": -1.0},
        )  # fmt: skip
    np.testing.assert_array_equal(rewards, [1.0, -1.0, np.nan])


def test_a_whole_group_is_compared_in_one_request(pool):
    with StandIn(lambda body, number: "I think [1, 2]. So: [0, null, 10]") as server:
        rewards, _ = rewards_of(
            pool, "generative", completion_group(["x", "y {problem}", "z"], "", columns={"problem": "P"}),
            base_url=server.base_url, model="m", prompt="{problem}\n{completions}",
        )  # fmt: skip
    np.testing.assert_array_equal(rewards, [0.0, np.nan, 1.0])
    (body,) = server.requests
    prompt = "P\nResponse 1:\nx\n\nResponse 2:\ny {problem}\n\nResponse 3:\nz"
    assert body["messages"][0]["content"] == prompt


def test_a_generative_model_that_goes_away_scores_nothing_and_comes_back(pool):
    up = [False]
    with StandIn(lambda body, number: "Score: 5" if up[0] else after(5, "late")) as server:
        kwargs = {"base_url": server.base_url, "model": "m", "timeout_s": 1.0, "max_retries": 0}
        scorer = Scorer(
            [spec("served", "generative", kwargs=kwargs | {"break_after": 1, "break_s": 0.5})], pool
        )
        first = scorer.score(completion_group(["a", "b", "c"], "")).rewards
        up[0] = True
        end = time.monotonic() + HANG_S
        while np.isnan(later := scorer.score(completion_group(["a"], "")).rewards[0]):
            assert time.monotonic() < end
            time.sleep(0.2)
        scorer.close()
    assert np.isnan(first).all() and later == 0.5


def refusal(**kwargs):
    kwargs = {"base_url": "http://127.0.0.1:9/v1", "model": "m", "max_retries": 0} | kwargs
    with pytest.raises(ValueError) as error:
        check_reward("generative", **kwargs)
    return str(error.value)


def test_settings_of_a_generative_model_that_cannot_score_are_refused():
    assert "expected {completion}" in refusal(prompt="Rate it.")
    for pattern in ("(", "(a{99999999999999999999})", "(" * 3000 + ")" * 3000):
        assert "no regular expression" in refusal(pattern=pattern)
    assert "expected a group around the score" in refusal(pattern="")
    assert "expected a group around the score" in refusal(pattern="Score")
    assert "expected the least before the largest" in refusal(range=[1, 1])
    assert "the model m at kwargs.base_url = http://127.0.0.1:9/v1 does not reply" in refusal()
    with StandIn(lambda body, number: "It is") as server:
        assert "raise kwargs.max_tokens = 512" in refusal(base_url=server.base_url)
