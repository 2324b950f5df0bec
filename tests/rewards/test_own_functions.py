"""User-supplied reward functions: of whole groups, asynchronous, of steps, and the arguments they name."""

import re
from dataclasses import replace

import numpy as np
import pytest
from transformers import AutoTokenizer

from actors.workers.reward import PolicyTokenizer, RewardWorker
from grpo_dist.config import RewardsConfig
from grpo_dist.config.rewards import ProcessRewardConfig
from grpo_dist.rewards import child
from grpo_dist.rewards.checks import check_rewards
from grpo_dist.rewards.pool import GraderPool
from grpo_dist.rewards.scorer import Scorer
from grpo_dist.types import Prompt, Rollout
from tests.support.made_completions import completion_group, spec
from tests.support.patience import HANG_S
from tests.support.reward_code import code_directory

CODE = """
import asyncio, os, time

def longest(completions, answer, finish_reason, source):
    assert finish_reason == ["stop", "length", "stop"] and source == "gsm8k"
    return [None if not text else float(len(text) == max(map(len, completions))) for text in completions]

def quotes(completion):
    return float(completion) if completion == "4" else {}[completion]

async def ranked(completions, token_ids):
    await asyncio.sleep(0.01)
    return [sum(ids) for ids in token_ids]

def too_few(completions):
    return [1.0]

def no_list(completions):
    return 1.0

def one_is_odd(completions):
    return [1.0, "x", 2.0]

def no_order(completions):
    return {text: 1.0 for text in completions}

def letters(completions):
    return "abc"

def digit(completions):
    return [1.0, "1", 2.0]

def right(completion, answer):
    return completion == answer

def hangs(completions):
    while True:
        pass

async def asked(completion, seconds=0.5):
    await asyncio.sleep(seconds if completion != "slow" else 60)
    if completion == "bad":
        raise RuntimeError("bad one")
    return None if completion == "none" else len(completion)

begun = []

async def together(completion, count):
    begun.append(completion)
    while len(begun) < count:  # for ever, where calls come one after the other
        await asyncio.sleep(0.01)
    return await asked(completion, 0.0)

async def blocks(completion):
    time.sleep(60)

async def dies(completion):
    if completion == "bad":
        os._exit(1)
    return len(completion)

def nosy(completion, token_ids, group, source, finish_reason):
    return 100 * len(token_ids) + 10 * len(group) + (finish_reason == "length") + (source == "gsm8k") / 2

def column(completion, source, group="unused"):
    return float(source)

def everything(completion, **rest):
    assert not {"token_ids", "group", "finish_reason", "source"} & set(rest)
    return 1.0

def right_steps(steps, answer, bonus=0.0):
    return [float("=" in step) + bonus for step in steps]

waiting = []

async def steps_together(steps, count):
    waiting.append(steps)
    while len(waiting) < count:  # for ever, where calls come one after the other
        await asyncio.sleep(0.01)
    return [1.0] * len(steps)

async def slow_steps(steps):
    if steps[0] == "slow":
        await asyncio.sleep(60)
    return [1.0] * len(steps)

def process_of_steps(steps):
    time.sleep(0.2)
    return [float(os.getpid())] * len(steps)

async def picky_steps(steps):
    if "?" in steps[-1]:
        raise ValueError("a question")
    return [1.0 if step else None for step in steps][: 1 if "short" in steps[0] else None]
"""
A_NUMBER = "expected a finite number, or None if it cannot be scored"
code = code_directory(own_rewards=CODE)


@pytest.fixture(scope="module")
def pool(code):
    with GraderPool(2, timeout_s=HANG_S, code_paths=[code]) as pool:
        yield pool


def scored(pool, name, completions, reduce=None, kwargs=None, **more):
    function = spec("own", f"own_rewards:{name}", kwargs=kwargs)
    if reduce:
        function = ProcessRewardConfig(**dict(function) | {"kind": "process", "reduce": reduce})
    reasons = ["length" if i == 1 else "stop" for i in range(len(completions))]
    group = replace(completion_group(completions, "4", reasons=reasons, **more), source="gsm8k")
    scorer = Scorer([function], pool)
    return scorer.score(group), scorer


@pytest.mark.slow
def test_a_function_of_completions_is_called_once_for_the_group(pool):
    scores, scorer = scored(pool, "longest", ["ab", "", "abc"])
    np.testing.assert_array_equal(scores.rewards, [0.0, np.nan, 1.0])
    assert scorer.failures == {}
    scores, _ = scored(pool, "ranked", ["a", "b"], lengths=[3, 4])
    assert scores.rewards.tolist() == [3.0, 6.0]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("too_few", "ValueError: own_rewards:too_few returned 1 numbers; expected 3"),
        ("no_list", "ValueError: own_rewards:no_list returned 1.0; expected a list of 3 numbers"),
        ("no_order", "ValueError: own_rewards:no_order returned a dict; expected a list of 3 numbers"),
        ("letters", "ValueError: own_rewards:letters returned the text 'abc'; expected a list of 3 numbers"),
        ("one_is_odd", f"ValueError: own_rewards:one_is_odd returned the text 'x'; {A_NUMBER}"),
        ("digit", f"ValueError: own_rewards:digit returned the text '1'; {A_NUMBER}"),
    ],
)
def test_a_group_without_a_number_each_is_not_scored(pool, name, reason):
    scores, scorer = scored(pool, name, ["a", "b", "c"])
    assert np.isnan(scores.rewards).all()
    assert scorer.failures == {"own": {reason: 3}}


def test_none_is_a_reason_of_its_sample_and_no_failure(pool):
    scores, scorer = scored(pool, "longest", ["ab", "", "abc"])
    assert scorer.failures == {} and [len(reasons) for reasons in scores.failures] == [0, 1, 0]
    assert scores.failures[1][0].startswith("reward own: it returned None or NaN, which mean that")


def test_exceptions_of_one_line_are_counted_as_one_with_the_first_text(pool):
    """Their texts differ and contain control characters of terminals."""
    scores, scorer = scored(pool, "quotes", ["a\x1b[2J\nb", "c\x00d", "4"])
    ((reason, count),) = scorer.failures["own"].items()
    assert count == 2 and len(scorer.news()) == 1
    assert re.fullmatch(r"KeyError: .*a\\x1b\[2J.*b.* \(/.*/own_rewards\.py:\d+ in quotes\)", reason)
    assert "c" in scores.failures[1][0] and reason.isprintable() and scores.failures[2] == ()


def test_a_function_of_a_group_that_hangs_is_killed(code):
    with GraderPool(1, timeout_s=0.5, code_paths=[code]) as pool:
        scores, scorer = scored(pool, "hangs", ["a", "b", "c"])
        assert np.isnan(scores.rewards).all()
        assert scorer.failures == {"own": {"no result within 1.5 s": 3}}


def test_asynchronous_calls_of_a_group_run_at_the_same_time(pool):
    """Ten calls in one process, each of which waits until all have started."""
    scores, scorer = scored(pool, "together", [*"abcdefg", "bad", "none", "xy"], kwargs={"count": 10})
    np.testing.assert_array_equal(scores.rewards, [1.0] * 7 + [np.nan, np.nan, 2.0])
    ((reason, count),) = scorer.failures["own"].items()
    assert re.fullmatch(r"RuntimeError: bad one \(/.*/own_rewards\.py:\d+ in asked\)", reason) and count == 1
    assert [reasons for reasons in scores.failures if reasons] == [
        (f"reward own: {reason}",),
        ("reward own: it returned None or NaN, which mean that it could not be scored",),
    ]


@pytest.mark.slow
def test_an_asynchronous_call_past_its_deadline_costs_only_its_own_sample(code):
    with GraderPool(1, timeout_s=5.0, code_paths=[code]) as pool:
        scores, scorer = scored(pool, "asked", ["a", "slow", "abc"], kwargs={"seconds": 0.0})
        np.testing.assert_array_equal(scores.rewards, [1.0, np.nan, 3.0])
        assert scorer.failures == {"own": {"no result within 5 s": 1}}
        pool._timeout_s = 0.5
        scores, scorer = scored(pool, "blocks", ["a", "b"])  # its loop cannot end the others
        assert np.isnan(scores.rewards).all() and scorer.failures == {"own": {"no result within 2.5 s": 2}}


def test_an_asynchronous_call_that_ends_the_process_costs_only_its_own_sample(pool):
    scores, scorer = scored(pool, "dies", ["a", "bad", "abc"])
    np.testing.assert_array_equal(scores.rewards, [1.0, np.nan, 3.0])
    assert scorer.failures == {"own": {"the grader process died (exit status 1)": 1}}


def test_a_function_gets_what_its_signature_names(pool):
    scores, _ = scored(pool, "nosy", ["a", "b"], lengths=[2, 3])
    assert scores.rewards.tolist() == [220.5, 321.5]
    scores, _ = scored(pool, "everything", ["a"])
    assert scores.rewards.tolist() == [1.0]


def test_a_column_of_the_data_comes_before_a_built_in_argument(pool):
    scores, _ = scored(pool, "column", ["a"], columns={"source": "7"})
    assert scores.rewards.tolist() == [7.0]


def test_steps_get_a_reward_each_and_together_one(pool):
    texts = ["a=1\n\nb\n\nc=2", "x", "y=1"]
    for reduce, expected in (("min", [0, 0, 1]), ("mean", [2 / 3, 0, 1]), ("last", [1, 0, 1])):
        scores, _ = scored(pool, "right_steps", texts, reduce)
        assert scores.rewards.tolist() == pytest.approx(expected)
        assert [steps.tolist() for steps in scores.steps.rewards] == [[1, 0, 1], [0], [1]]
        assert scores.steps.char_ends == ([5, 8, 11], [1], [3])
    scores, _ = scored(pool, "right_steps", texts[1:2], "min", {"bonus": 0.5})
    assert scores.rewards.tolist() == [0.5]


def test_steps_that_cannot_be_scored_are_nan_and_keep_their_ends(pool):
    scores, scorer = scored(pool, "picky_steps", ["a\n\nb?", "", "short\n\nb"], "mean")
    assert np.isnan(scores.rewards).all()
    assert [np.isnan(row).tolist() for row in scores.steps.rewards] == [[True, True], [True], [True, True]]
    question, short = sorted(scorer.failures["own"])
    assert re.fullmatch(r"ValueError: a question \(/.*/own_rewards\.py:\d+ in picky_steps\)", question)
    assert short == "ValueError: own_rewards:picky_steps returned 1 numbers; expected 2"


@pytest.mark.slow
def test_step_rewards_that_are_not_asynchronous_use_all_processes(code):
    with GraderPool(2, timeout_s=HANG_S, code_paths=[str(code)]) as pool:
        scores, _ = scored(pool, "process_of_steps", ["a", "b", "c", "d"] * 2, "min")
    assert len(set(scores.rewards.tolist())) == 2


@pytest.mark.slow
def test_each_sample_has_the_deadlines_of_its_own_steps(code):
    """Each step has 1 s; the other samples keep their scores, and the reason names the deadline."""
    with GraderPool(1, timeout_s=1.0, code_paths=[str(code)]) as pool:
        texts = ["slow", "a\n\nb", "slow\n\nb"]
        scores, scorer = scored(pool, "slow_steps", texts, "min")
    np.testing.assert_array_equal(scores.rewards, [np.nan, 1.0, np.nan])
    assert scorer.failures["own"] == {"no result within 1 s": 1, "no result within 2 s": 1}


def test_the_group_carries_the_rewards_of_steps_at_the_policys_tokens(code, tiny_model):
    """One token per character, and EOS: the steps end with tokens 4 and 6; in the second sample with 1."""
    function = {"function": "own_rewards:right_steps", "kind": "process", "reduce": "mean"}
    settings = RewardsConfig.model_validate({"functions": [function], "code_paths": [code]})
    worker = RewardWorker(settings, max_new_tokens=24, policy=PolicyTokenizer(str(tiny_model), False))
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    texts = ["a=1\n\nb", "c"]
    ids = [np.array([*tokenizer(text)["input_ids"], tokenizer.eos_token_id], np.int32) for text in texts]
    samples = [
        Rollout("p", i, row, np.zeros(len(row), np.float32), "stop", text, np.zeros(len(row), np.int32))
        for i, (text, row) in enumerate(zip(texts, ids, strict=True))
    ]
    try:
        group, news = worker.score(Prompt("p", np.array([1], np.int32), "4", "gsm8k"), samples, {})
    finally:
        worker.close()
    assert group.rewards.tolist() == [0.5, 0.0] and news == ()
    assert [steps.tolist() for steps in group.step_rewards] == [[1.0, 0.0], [0.0]]
    assert [ends.tolist() for ends in group.step_ends] == [[4, 6], [1]]


@pytest.mark.slow
def test_the_configuration_selects_which_function_scores_steps(code):
    function = {"function": "own_rewards:right_steps", "kind": "process", "reduce": "last"}
    settings = RewardsConfig.model_validate({"functions": [function], "code_paths": [code]})
    assert settings.scores_steps
    check_rewards(settings, max_new_tokens=10)
    wrong = settings.model_copy(update={"functions": (ProcessRewardConfig(function="own_rewards:nosy"),)})
    with pytest.raises(ValueError, match=r"expected a parameter `steps`.*it has completion, finish_reason"):
        check_rewards(wrong, max_new_tokens=10)
    wrong = settings.model_copy(update={"functions": (ProcessRewardConfig(function="math"),)})
    with pytest.raises(ValueError, match=r"rewards\.functions math: .*built-in reward math scores no steps"):
        check_rewards(wrong, max_new_tokens=10)
    with pytest.raises(ValueError, match="two rewards of steps"):
        RewardsConfig.model_validate(
            {"functions": [function], "models": [{"name": "m", "path": "p", "kind": "classifier"}]}
        )


def test_calls_of_all_groups_share_one_event_loop(tmp_path, monkeypatch):
    """A client that a module keeps is bound to the event loop that created it."""
    (tmp_path / "kept_client.py").write_text(
        "import asyncio\nLOOPS = []\n"
        "async def f(completion):\n"
        "    LOOPS.append(asyncio.get_running_loop())\n"
        "    await asyncio.sleep(60 if completion == 'slow' else 0)\n"
        "    return float(all(loop is LOOPS[0] and not loop.is_closed() for loop in LOOPS))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    slow, fast = {"completion": "slow"}, {"completion": "fast"}
    first = child._call("kept_client:f", [slow, fast], [0.5, 0.5], [None, None])
    assert first[0][0] == "timeout" and first[1] == ["ok", 1.0]
    assert child._call("kept_client:f", [fast], [HANG_S], [None]) == [["ok", 1.0]]
