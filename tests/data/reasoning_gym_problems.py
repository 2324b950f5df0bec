"""Tests of `reasoning_gym:<task>` as a source of problems, and of the task's own scorer as a reward.

The package must be importable where a source reads it, so `test_reasoning_gym.py` runs them in an interpreter
that has it.
"""

import ast
import json
import os
import subprocess
import sys

import pytest

from grpo_dist.config import DataSourceConfig, RewardsConfig
from grpo_dist.data.readers import read
from grpo_dist.demo.tokenizer import character_tokenizer
from grpo_dist.environments import reasoning_gym as adapter
from grpo_dist.rewards.checks import check_rewards
from grpo_dist.rewards.group import CompletionGroup
from grpo_dist.rewards.pool import GraderPool
from grpo_dist.rewards.reasoning_gym import score
from grpo_dist.rewards.scorer import Scorer
from tests.support.made_groups import group_of

REWARD = "grpo_dist.rewards.reasoning_gym:score"


def source(split="train", task="chain_sum", rows=40, **kwargs):
    return DataSourceConfig(path=f"reasoning_gym:{task}", split=split, max_rows=rows, kwargs=kwargs)


def test_rows_are_different_problems_with_answers():
    config = source(max_terms=3, seed=1)
    rows = read(config)
    assert len({row.problem for row in rows}) == 40 and all(int(row.answer) is not None for row in rows)
    assert config.label == rows[0].source == "chain_sum"
    assert rows[0].location == "reasoning_gym:chain_sum/train:1"
    assert read(source(max_terms=3, seed=2))[0].problem != rows[0].problem


@pytest.mark.parametrize("task", ["polynomial_multiplication", "list_functions"])
def test_rows_repeat_in_a_process_with_another_hash_of_strings_and_are_scored_as_asked(task):
    """These tasks depend on the order of sets of strings, or on the module's own random numbers."""
    config = source(task=task, rows=6)
    rows = read(config)
    code = (
        "import json, random; random.random()\n"
        "from grpo_dist.data.readers import read\nfrom grpo_dist.config import DataSourceConfig\n"
        "from grpo_dist.rewards.reasoning_gym import score\n"
        f"rows = read(DataSourceConfig(**{config.model_dump()!r}))\n"
        f"asked = json.loads({json.dumps([[r.answer, r.columns['reasoning_gym']] for r in rows])!r})\n"
        "print(json.dumps([[r.problem for r in rows], [score(*one) for one in asked]]))"
    )
    environ = os.environ | {"PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ
    )
    assert json.loads(done.stdout) == [[row.problem for row in rows], [1.0] * 6]


def test_an_entry_is_kept_with_its_tuples_and_names_and_what_cannot_be_kept_is_refused():
    for task in ("knights_knaves", "word_ladder", "time_intervals"):
        row = read(source(task=task, rows=1))[0]
        assert score(f"<answer>{row.answer}</answer>", row.columns["reasoning_gym"]) == 1.0
    with pytest.raises(ValueError, match="an entry cannot be stored for its scorer"):
        adapter._literal({"question": "?", "metadata": {"made": object()}}, "own")


def test_a_data_set_is_as_large_as_needed_and_the_packages_limit_is_a_separate_reason(monkeypatch):
    """word_ladder has at most 20,000 problems, of which a tenth is held out."""
    sizes = []
    original = adapter._data_set
    monkeypatch.setattr(
        adapter, "_data_set", lambda name, how: sizes.append(json.loads(how)) or original(name, how)
    )
    assert len(list(adapter._made_rows("chain_sum", "test", 20, {}))) == 20
    assert [how["size"] for how in sizes] in ([200], [200, 400])
    with pytest.raises(ValueError, match=r"the package refuses .*'size': 30000.*too large") as error:
        next(adapter._made_rows("word_ladder", "test", 3000, {}))
    assert "no such task" not in str(error.value)


def test_no_held_out_problem_is_ever_trained_on_whatever_seeds_and_settings_made_it():
    """Few digits, so that the same problems come again and again: they would leak without the rule."""
    few = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    trained = {r.problem for seed in range(4) for r in read(source(rows=60, seed=seed, **few))}
    wider = {**few, "max_terms": 3}
    held_out = {r.problem for s in (few, wider) for r in read(source("test", rows=8, seed=0, **s))}
    assert len(trained) > 50 and len(held_out) > 8 and not trained & held_out


def scored(rows, answers):
    settings = RewardsConfig(functions=[{"function": REWARD}], timeout_s=60.0)
    check_rewards(settings, max_new_tokens=8)
    rewards = []
    with GraderPool(1, timeout_s=60.0) as pool:
        scorer = Scorer(settings.functions, pool)
        for row, texts in zip(rows, answers, strict=True):
            made = group_of([0.0] * len(texts), [1] * len(texts))
            group = CompletionGroup(
                tuple(texts), tuple(r.completion_ids for r in made.rollouts), ("stop",) * len(texts),
                row.answer, row.columns, 8,
            )  # fmt: skip
            rewards.append(scorer.score(group).rewards.tolist())
        assert scorer.failures == {}
    return rewards


def test_the_tasks_own_scorer_is_a_reward_in_a_process_of_its_own():
    """Also for a task whose problems have many right answers, of which the row has one."""
    sums, countdown = read(source(max_terms=3))[:2], read(source(task="countdown", rows=3))[0]
    right = [row.answer for row in sums]
    rewards = scored(
        [*sums, countdown],
        [
            [right[0], f"I say \\boxed{{{right[0]}}}.", f"<answer>{right[0]}</answer>", "none"],
            [right[1], "none"],
            [countdown.answer, f"({countdown.answer})", "1"],
        ],
    )
    assert rewards[0] == [1.0, 1.0, 1.0, 0.0] and rewards[1] == [1.0, 0.0]
    assert rewards[2][:2] == [1.0, 1.0] and rewards[2][2] < 0.5


UNREADABLE = [
    ("prime_factorization", "I give up"), ("game_of_life", "{}"), ("boxnet", "-5"), ("coin_flip", "1e400"),
]  # fmt: skip


@pytest.mark.parametrize(("task", "answer"), UNREADABLE)
def test_an_answer_that_the_packages_scorer_cannot_read_is_wrong_and_not_unscored(task, answer):
    """An evaluation would leave out exactly these wrong answers."""
    column = next(adapter._made_rows(task, "train", 1, {}))[adapter.COLUMN]
    with pytest.raises((ValueError, KeyError, TypeError, OverflowError)):
        adapter._data_set(task, "{}").score_answer(answer, ast.literal_eval(column["entry"]))
    assert score(f"<answer>{answer}</answer>", column) == 0.0


def test_a_scorer_that_fails_with_the_packages_own_answer_raises():
    column = next(adapter._made_rows("prime_factorization", "train", 1, {}))[adapter.COLUMN]
    entry = ast.literal_eval(column["entry"]) | {"answer": "lost"}
    with pytest.raises(ValueError):
        score("2", {**column, "entry": repr(entry)})


def test_an_answer_that_takes_too_much_memory_is_none_of_a_score(monkeypatch):
    class Scorer:
        def score_answer(self, answer, entry):
            if answer != entry["answer"]:
                raise MemoryError
            return 1.0

    monkeypatch.setattr(adapter, "_data_set", lambda name, settings: Scorer())
    with pytest.raises(MemoryError):
        score("9" * 9, {"task": "own", "settings": {}, "entry": "{'answer': '1'}"})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: read(source(task="chain_sums")), "reasoning_gym:chain_sums: no such task"),
        (lambda: read(source(max_term=3)), "refuses the settings {'max_term': 3"),
        (lambda: read(source("test", rows=99, min_terms=2, max_terms=2, max_digits=1)), "lower `max_rows`"),
        (lambda: read(source(seed=None)), "kwargs.seed = null: expected a number"),
        (lambda: source(size=3), "kwargs.size = 3: use `max_rows`"),
        (lambda: DataSourceConfig(path="x.jsonl", kwargs={"a": 1}),
         "`reasoning_gym:<task>`, but path = x.jsonl"),
    ],
)  # fmt: skip
def test_what_cannot_be_made_is_refused_with_its_remedy(build, message):
    with pytest.raises(ValueError) as error:
        build()
    assert message in str(error.value)


def test_a_row_becomes_a_prompt_that_carries_what_its_scorer_needs():
    from grpo_dist.config import DataConfig
    from grpo_dist.data.prompts import PromptFormat, build_prompts

    config = source(rows=3)
    rows, data = read(config), DataConfig(train=(config,))
    built = build_prompts(rows, character_tokenizer(), PromptFormat.from_config(data), max_prompt_tokens=900)
    assert [p.columns["reasoning_gym"] for p in built.prompts] == [r.columns["reasoning_gym"] for r in rows]
    assert len({p.uid for p in built.prompts}) == 3
