"""Rewards by name: weights, unscored samples, user functions, and rejected settings."""

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from grpo_dist.config import RewardConfig, RewardsConfig
from grpo_dist.config.rewards import OutcomeModelConfig
from grpo_dist.rewards.checks import check_rewards, graded_problems
from grpo_dist.rewards.pool import GraderPool
from grpo_dist.rewards.registry import REWARDS, make
from grpo_dist.rewards.scorer import Scorer
from tests.support import fakes
from tests.support.made_completions import completion_group, spec
from tests.support.patience import HANG_S, in_time
from tests.support.reward_code import code_directory

CODE = """
import math

def length(completion, answer, scale=1.0):
    return scale * len(completion)

def by_level(completion, answer, level, **rest):
    assert answer == "4"
    return float(level) + len(rest)

def picky(completion, answer):
    if "5" in completion:
        raise RuntimeError("no fives please")
    return None if "nothing" in completion else 1.0

def endless(completion, answer):
    while "loop" in completion:
        pass
    return 2.0

def noisy(completion, answer):
    return completion + "!"

def huge(completion, answer):
    return float(completion)

not_a_function = 3
"""


code = code_directory(my_rewards=CODE, broken_rewards="import no_such_package\n")


@pytest.fixture(scope="module")
def pool(code: str) -> Iterator[GraderPool]:
    with GraderPool(2, timeout_s=HANG_S, code_paths=[code]) as pool:
        yield pool


COMPLETIONS = ["<think>2+2</think>\\boxed{4}", "\\boxed{4}", "<think>2+2</think>\\boxed{5}", "no idea"]


def test_the_reward_is_the_weighted_sum_of_the_parts(pool: GraderPool) -> None:
    specs = [spec("math", "math", 1.0), spec("shape", "format", 0.25), spec("idle", "format", 0.0)]
    scores = Scorer(specs, pool).score(completion_group(COMPLETIONS, "4"))
    assert scores.rewards.dtype == np.float32
    assert scores.rewards.tolist() == [1.25, 1.0, 0.25, 0.0]
    assert {name: part.tolist() for name, part in scores.parts.items()} == {
        "math": [1.0, 1.0, 0.0, 0.0],
        "shape": [1.0, 0.0, 1.0, 0.0],
        "idle": [1.0, 0.0, 1.0, 0.0],
    }
    assert all(part.dtype == np.float32 for part in scores.parts.values())
    assert scores.outcomes == ["correct", "correct", "wrong", "no_answer"]


def test_an_unscored_sample_is_nan_not_zero(pool: GraderPool) -> None:
    specs = [spec("math", "math"), spec("picky", "my_rewards:picky", 0.5)]
    group = completion_group(["\\boxed{4}", "\\boxed{5}", "nothing \\boxed{4}"], "4")
    scores = Scorer(specs, pool).score(group)
    assert np.isnan(scores.rewards).tolist() == [False, True, True]
    assert scores.rewards[0] == 1.5
    assert scores.parts["math"].tolist() == [1.0, 0.0, 1.0]
    assert scores.outcomes == ["correct", "wrong", "correct"]


@pytest.mark.slow
def test_a_timeout_makes_its_own_sample_nan(code: str) -> None:
    endless = completion_group(["a", "loop", "b"], "4")
    with GraderPool(2, timeout_s=1.0, code_paths=[code]) as pool:
        scorer = Scorer([spec("e", "my_rewards:endless")], pool)
        unscored = lambda scores: ["timeout" if np.isnan(r) else "" for r in scores.rewards[::2]]  # noqa: E731
        scores = in_time(pool, lambda: scorer.score(endless), unscored)
    assert scores.outcomes == ["", "", ""]
    assert np.isnan(scores.rewards).tolist() == [False, True, False]


def test_an_unscored_part_of_weight_zero_keeps_the_reward(pool: GraderPool) -> None:
    specs = [spec("format", "format"), spec("picky", "my_rewards:picky", 0.0)]
    scores = Scorer(specs, pool).score(completion_group(["<think>2+3</think>\\boxed{5}"], "5"))
    assert scores.rewards.tolist() == [1.0]
    assert np.isnan(scores.parts["picky"]).tolist() == [True]


def test_functions_receive_columns_and_keywords(pool: GraderPool) -> None:
    length = spec("length", "my_rewards:length", 1.0, {"scale": 0.5})
    group = completion_group(["abcd", "ab"], "4", columns={"level": 3, "problem": "2+2"})
    scores = Scorer([length, spec("level", "my_rewards:by_level", 10.0)], pool).score(group)
    assert scores.parts["length"].tolist() == [2.0, 1.0]
    assert scores.parts["level"].tolist() == [4.0, 4.0]
    assert scores.rewards.tolist() == [42.0, 41.0]


def test_failures_are_counted_and_reported_once(pool: GraderPool) -> None:
    scorer = Scorer([spec("picky", "my_rewards:picky")], pool)
    news = []
    for _ in range(3):
        scorer.score(completion_group(["5", "5", "6"], "6"))
        news.append(scorer.news())
    ((reason, count),) = scorer.failures["picky"].items()
    assert re.fullmatch(r"RuntimeError: no fives please \(/.*/my_rewards\.py:\d+ in picky\)", reason)
    assert count == 6 and news == [(f"reward picky: {reason}",), (), ()]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("maths", ["'maths'", "math", "format", "module:function"]),
        ("my_rewards:", ["'my_rewards:'", "module:function"]),
        (":length", ["':length'", "module:function"]),
        ("my_rewards:absent", ["my_rewards", "absent", "no function"]),
        ("my_rewards:not_a_function", ["not_a_function", "no function"]),
        ("absent_module:length", ["absent_module", "cannot be imported", "code_paths"]),
        ("broken_rewards:length", ["broken_rewards", "no_such_package"]),
    ],
)
def test_a_reward_that_cannot_be_used_is_refused(pool: GraderPool, function: str, words: list[str]) -> None:
    with pytest.raises(ValueError) as refusal:
        Scorer([spec("r", function)], pool)
    assert [word for word in words if word not in str(refusal.value)] == []


def test_two_rewards_of_one_name_are_refused(pool: GraderPool) -> None:
    with pytest.raises(ValueError, match="share a name"):
        Scorer([spec("r", "math"), spec("r", "format")], pool)


def test_the_configuration_names_rewards(code: str) -> None:
    settings = RewardsConfig(
        functions=(
            RewardConfig(function="math"),
            RewardConfig(name="brief", function="my_rewards:length", weight=-0.1, kwargs={"scale": 2}),
        ),
        code_paths=(code,),
    )
    check_rewards(settings, max_new_tokens=100)
    with pytest.raises(ValueError, match="cannot be imported"):
        check_rewards(settings.model_copy(update={"code_paths": ()}), max_new_tokens=100)


@pytest.mark.parametrize(
    ("function", "kwargs", "words"),
    [
        ("math", {"scale": 2}, ["unknown key kwargs.scale", "math takes: none"]),
        ("overlong", {"buffer_tokens": 0},
         ["kwargs.buffer_tokens = 0", "greater than 0", "takes: buffer_tokens"]),
        ("overlong", {"buffer_tokens": 101}, ["101", "`sampling.max_new_tokens` = 100", "e.g. 25"]),
        ("repetition", {"n": "many"}, ["kwargs.n = 'many'", "integer"]),
        ("language", {"scripts": "klingon"}, ["'klingon'", "cyrillic", "han"]),
        ("numeric", {"relative": -1}, ["kwargs.relative = -1"]),
        ("cosine_length", {"correct": [1.0]}, ["kwargs.correct"]),
        ("judge", {"model": "m"}, ["kwargs.base_url is missing", "only_when"]),
    ],
)  # fmt: skip
def test_unknown_settings_of_a_built_in_are_rejected(function, kwargs, words) -> None:
    settings = RewardsConfig(functions=(RewardConfig(name="mine", function=function, kwargs=kwargs),))
    with pytest.raises(ValueError) as refusal:
        check_rewards(settings, max_new_tokens=100)
    message = str(refusal.value)
    assert "rewards.functions mine" in message and "\n" not in message
    assert [word for word in words if word not in message] == []


NEEDED = {
    "language": {"scripts": "latin"}, "overlong": {"buffer_tokens": 8}, "remote": {"url": "http://x"},
    "judge": {"base_url": "http://x", "model": "m"}, "generative": {"base_url": "http://x", "model": "m"},
}  # fmt: skip
NEED_A_SERVICE = {"judge", "remote", "generative", "unit_tests", "environment"}  # not scored here


def reward(function, kwargs=None):
    return make(spec("r", function, kwargs=NEEDED.get(function, {}) | (kwargs or {})))


@pytest.mark.parametrize("function", sorted(set(REWARDS) - NEED_A_SERVICE))
def test_a_reward_that_is_not_graded_gives_0_and_1_alone(pool: GraderPool, function: str) -> None:
    texts = [*COMPLETIONS, "four 四", "4 " * 100, "<think>2</think><answer>4</answer>"]
    tokens = tuple(np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts)
    group = replace(completion_group(texts, "4"), token_ids=tokens)
    scores = Scorer([spec("r", function, kwargs=NEEDED.get(function, {}))], pool).score(group)
    assert reward(function).is_graded == bool(set(scores.rewards.tolist()) - {0.0, 1.0})


@pytest.mark.parametrize("function", sorted(set(REWARDS) - NEED_A_SERVICE))
def test_a_blind_reward_gives_a_right_and_a_wrong_answer_the_same(pool: GraderPool, function: str) -> None:
    scorer = Scorer([spec("r", function, kwargs=NEEDED.get(function, {}))], pool)
    longer = "\\boxed{5}" + " so" * 30
    right, wrong = (
        scorer.score(completion_group([f"The answer is \\boxed{{{n}}}.", longer], "4")).rewards[0]
        for n in (4, 5)
    )
    assert REWARDS[function].is_blind == (right == wrong)


def test_an_estimator_sees_the_rewards_of_its_sources_alone() -> None:
    graded, plain = {"functions": ["math", "cosine_length"]}, {"functions": ["math"]}
    source_b = {"path": "b", "algorithm": {"advantage": "grpo"}}
    config = fakes.config(
        data={"train": [{"path": "a"}, source_b]}, rewards={"by_source": {"a": plain, "b": graded}},
        algorithm={"advantage": "maxrl"},
    )  # fmt: skip
    of_maxrl, of_grpo = config.rewards_by_estimator
    assert (of_maxrl[0], of_grpo[0]) == ("maxrl", "grpo")
    assert list(graded_problems(config.rewards, "maxrl")) and not list(graded_problems(of_maxrl[1], "maxrl"))
    assert [one.function for one in of_grpo[1].functions] == ["math", "cosine_length"]


def test_maxrl_refuses_graded_rewards_before_a_run() -> None:
    functions = (
        RewardConfig(function="cosine_length", name="brief"),
        RewardConfig(function="repetition", weight=0),  # only reported
        RewardConfig(function="overlong", kwargs={"buffer_tokens": "many"}),  # refused as such
        RewardConfig(function="mine:graded"),
    )
    settings = RewardsConfig(functions=functions)
    (problem,) = graded_problems(settings, "maxrl")
    assert problem == (
        "`algorithm.advantage` = maxrl needs a reward of 0 and 1, but `cosine_length` has other values; set "
        "its `weight` to 0, or use another advantage"
    )
    assert list(graded_problems(settings, "grpo")) == list(graded_problems(settings, "mine:own")) == []


def test_random_rewards_depend_on_the_seed_and_never_on_the_text(pool: GraderPool) -> None:
    def scored(seed: int, gold: str, text: str = "4") -> list[float]:
        specs = [spec("random", "random", kwargs={"seed": seed, "share": 0.3})]
        return Scorer(specs, pool).score(completion_group([text] * 16, gold)).parts["random"].tolist()

    assert scored(0, "4") == scored(0, "4", "right or wrong")
    assert scored(0, "4") != scored(1, "4") and scored(0, "4") != scored(0, "5")
    values = [value for gold in range(200) for value in scored(0, str(gold))]
    assert set(values) == {0.0, 1.0}
    assert np.mean(values) == pytest.approx(0.3, abs=0.03)  # 3.7 standard errors of 3200 draws


def test_built_in_rewards_see_tokens_and_the_group(pool: GraderPool) -> None:
    specs = [
        spec("overlong", "overlong", kwargs={"buffer_tokens": 20}),
        spec("cosine", "cosine_length", kwargs={"correct": [2.0, 1.0], "wrong": [-1.0, 0.0], "exceed": -3.0}),
        spec("relative", "relative_length"),
        spec("repetition", "repetition", kwargs={"n": 2}),
    ]
    texts, reasons = ["\\boxed{4}"] * 2 + ["\\boxed{5}"] * 2, ["stop", "stop", "stop", "length"]
    group = completion_group(texts, "4", lengths=[50, 90, 70, 100], reasons=reasons)
    scores = Scorer(specs, pool).score(group)
    assert scores.parts["overlong"].tolist() == [0.0, -0.5, 0.0, -1.0]
    assert scores.parts["cosine"].tolist()[::3] == [1.5, -3.0]
    assert scores.parts["cosine"][2] == pytest.approx(-0.5 * (1 + np.cos(0.7 * np.pi)))
    assert scores.parts["relative"] == pytest.approx([0.5, -0.3, 0.0, -0.5])
    assert scores.parts["repetition"].tolist() == [0.0] * 4
    assert scores.outcomes == ["correct", "correct", "wrong", "wrong"]  # the length rewards need them


def test_text_rewards(pool: GraderPool) -> None:
    specs = [
        spec("exact", "exact"),
        spec("numeric", "numeric", kwargs={"relative": 0.01}),
        spec("language", "language", kwargs={"scripts": "cyrillic"}),
    ]
    group = completion_group(["ответ is \\boxed{40.1}", "ответ \\boxed{40}"], "40")
    scores = Scorer(specs, pool).score(group)
    assert scores.parts["exact"].tolist() == [0.0, 1.0]
    assert scores.parts["numeric"].tolist() == [1.0, 1.0]
    assert scores.parts["language"].tolist() == [0.5, 1.0]
    assert scores.outcomes == ["", ""]


def test_a_gate_decides_which_samples_a_part_counts_for(pool: GraderPool) -> None:
    specs = [
        spec("right", "my_rewards:huge", 1.0),
        spec("overlong", "overlong", 2.0, {"buffer_tokens": 100}, gate="right", gate_above=0.5),
    ]
    group = completion_group(["1", "0", "nan"], "4", lengths=[25, 50, 75])
    scores = Scorer(specs, pool).score(group)
    assert scores.parts["overlong"].tolist() == [-0.25, -0.5, -0.75]
    assert scores.rewards[:2].tolist() == [0.5, 0.0]
    assert np.isnan(scores.rewards[2])


def test_a_reward_beyond_float32_is_unscored_and_reported(pool: GraderPool) -> None:
    scorer = Scorer([spec("huge", "my_rewards:huge")], pool)
    scores = scorer.score(completion_group(["1e39", "-1e300", "inf", "nan", "3e38"], "4"))
    np.testing.assert_array_equal(scores.rewards, np.array([np.nan] * 4 + [3e38], np.float32))
    news = [line.partition(",")[0] for line in scorer.news()[-2:]]
    assert news == ["reward huge: gave 1e+39", "reward huge: gave -1e+300"]


def test_an_infinite_score_of_a_reward_model_is_unscored(pool: GraderPool) -> None:
    scorer = Scorer([], pool, models=[OutcomeModelConfig(name="quality", path="m")])
    scores = scorer.score(completion_group(["a", "b"], "4"), {"quality": np.array([np.inf, 1.0], np.float32)})
    np.testing.assert_array_equal(scores.rewards, [np.nan, 1.0])


def test_whether_a_reward_is_graded_may_depend_on_its_settings() -> None:
    assert not reward("judge").is_graded and not reward("remote").is_graded
    assert reward("environment").is_graded and not reward("unit_tests").is_graded
    assert reward("unit_tests", {"reward": "share"}).is_graded
    assert reward("generative").is_graded  # a number from 0 to 10
    assert not reward("generative", {"verdicts": {"yes": 1, "no": 0}}).is_graded
    assert reward("generative", {"verdicts": {"yes": 1, "maybe": 0.5, "no": 0}}).is_graded
