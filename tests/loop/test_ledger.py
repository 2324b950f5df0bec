"""Every prompt is in the ledger once, with its outcome, also across a kill."""

import json

import numpy as np
import pytest

from grpo_dist.loop.ledger import audit, ledger_entry, read, summary, totals
from grpo_dist.runtime.files import StepLines
from tests.support import made_groups

RNG = np.random.default_rng(0)
REWARDS = [1.0, 0.0], [1.0, 1.0], [np.nan, np.nan], [0.0, np.nan]
SOME = [made_groups.group(i, RNG, samples=2, rewards=rewards) for i, rewards in enumerate(REWARDS)]


def test_each_group_has_one_outcome():
    replaced = [made_groups.group(9, np.random.default_rng(0), samples=2, rewards=[0.0, 0.0])]
    entry = ledger_entry(SOME, replaced, with_signal={0})
    assert entry == {"trained": ["p0"], "no_signal": ["p1", "p3"], "unscored": ["p2"], "put_aside": ["p9"]}
    assert ledger_entry(SOME, [], with_signal={0}, skipped=True) == {
        "no_signal": ["p1", "p3"], "unscored": ["p2"], "skipped": ["p0"],
    }  # fmt: skip


def test_totals_cover_all_steps(tmp_path):
    ledger = StepLines(tmp_path / "ledger.jsonl", keep_through=0)
    ledger.add(1, ledger_entry(SOME, [], with_signal={0}))
    ledger.add(2, ledger_entry(SOME, [], with_signal={0, 1, 3}))
    assert totals(tmp_path / "ledger.jsonl") == {
        "trained": 4, "no_signal": 2, "unscored": 2, "put_aside": 0, "skipped": 0,
    }  # fmt: skip
    assert summary(tmp_path / "ledger.jsonl") == (
        "ledger: 8 prompts sampled = 4 trained + 2 zero-variance (all advantages 0) + 2 unscored"
    )
    assert summary(tmp_path / "ledger.jsonl", dropped=3).endswith(
        "+ 2 unscored; 3 rows dropped before, too long (dropped.jsonl)"
    )
    assert audit(tmp_path / "ledger.jsonl", steps=2, prompts_per_step=4) is None


def test_a_run_that_trained_on_no_prompt_says_so(tmp_path):
    StepLines(tmp_path / "ledger.jsonl", keep_through=0).add(1, ledger_entry(SOME, [], with_signal=set()))
    assert summary(tmp_path / "ledger.jsonl") == (
        "ledger: 4 prompts sampled = 0 trained + 3 zero-variance (all advantages 0) + 1 unscored"
        "; nothing was trained, the weights are unchanged"
    )


def test_a_resumed_run_rewrites_its_lines_and_a_torn_line_is_ignored(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = StepLines(path, keep_through=0)
    for step in (1, 2, 3):
        ledger.add(step, ledger_entry(SOME, [], with_signal={0}))
    with path.open("a") as file:
        file.write('{"step": 4, "trai')
    assert [line["step"] for line in read(path)] == [1, 2, 3]
    resumed = StepLines(path, keep_through=2)
    resumed.add(3, ledger_entry(SOME, [], with_signal={1}))
    assert [line["trained"] for line in read(path)] == [["p0"], ["p0"], ["p1"]]
    assert audit(path, steps=3, prompts_per_step=4) is None
    assert StepLines(path, keep_through=0) and read(path) == []


def test_a_repeated_line_does_not_balance(tmp_path):
    path = tmp_path / "ledger.jsonl"
    lines = [json.dumps({"step": step, "trained": ["a", "b"]}) + "\n" for step in (1, 2)]
    path.write_text("".join(lines))
    assert audit(path, steps=2, prompts_per_step=2) is None
    path.write_text("".join([*lines, lines[-1]]))
    assert "once each" in audit(path, steps=2, prompts_per_step=2)


def test_a_prompt_that_is_trained_in_the_wrong_step_is_found(tmp_path):
    """The second step of an epoch repeats a prompt of the first instead of its own."""
    ledger = StepLines(tmp_path / "ledger.jsonl", keep_through=0)
    ledger.add(1, {"trained": ["a", "b"]})
    ledger.add(2, {"trained": ["a"], "no_signal": ["c"]})
    ledger_args = {"path": tmp_path / "ledger.jsonl", "steps": 2, "prompts_per_step": 2}
    assert audit(**ledger_args) is None
    assert audit(**ledger_args, expected_per_step=lambda step: {1: "ab", 2: "ca"}[step]) is None
    problem = audit(**ledger_args, expected_per_step=lambda step: {1: "ab", 2: "cd"}[step])
    assert problem.endswith("step 2 lacks prompt d, which it must have")


def test_a_prompt_that_is_sampled_too_often_or_never_is_found(tmp_path):
    """Dynamic sampling decides in which step a prompt is used."""
    ledger = StepLines(tmp_path / "ledger.jsonl", keep_through=0)
    ledger.add(1, {"trained": ["a", "b"], "put_aside": ["c"]})
    ledger.add(2, {"no_signal": ["a"], "trained": ["d"]})
    ledger_args = {"path": tmp_path / "ledger.jsonl", "steps": 2, "prompts_per_step": 2}
    assert audit(**ledger_args, expected_counts={"a": 2, "b": 1, "c": 1, "d": 1}) is None
    problem = audit(**ledger_args, expected_counts={"a": 1, "b": 1, "c": 1, "d": 1})
    assert problem.endswith("prompt a was sampled 2 times, expected 1")
    problem = audit(**ledger_args, expected_counts={"a": 2, "b": 1, "c": 1, "d": 1, "e": 1})
    assert problem.endswith("prompt e was sampled 0 times, expected 1")
    assert audit(**ledger_args, expected_counts={"a": 2, "b": 1, "c": 1}).endswith(
        "d was sampled 1 times, expected 0"
    )


@pytest.mark.parametrize("lines", [[1, 3], [1, 1], [1]])
def test_a_step_that_is_missing_or_duplicated_is_found(tmp_path, lines):
    ledger = StepLines(tmp_path / "ledger.jsonl", keep_through=0)
    for step in lines:
        ledger.add(step, ledger_entry(SOME, [], with_signal={0}))
    problem = audit(tmp_path / "ledger.jsonl", steps=2, prompts_per_step=4)
    assert "expected 1 to 2, once each" in problem


def test_a_prompt_that_is_duplicated_or_missing_is_found(tmp_path):
    path = tmp_path / "ledger.jsonl"
    StepLines(path, keep_through=0).add(1, {"trained": ["a", "b"], "no_signal": ["a"]})
    assert "step 1 has a prompt twice" in audit(path, steps=1, prompts_per_step=3)
    StepLines(path, keep_through=0).add(1, {"trained": ["a", "b"], "put_aside": ["c"]})
    assert "step 1 has 2 prompts, expected 3" in audit(path, steps=1, prompts_per_step=3)
    assert audit(path, steps=1, prompts_per_step=2) is None
