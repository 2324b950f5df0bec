"""Answers that hang, take memory or confuse affect at most their own reward."""

import math
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_dist.rewards.pool import GraderPool
from grpo_dist.rewards.scorer import Scorer, Scores
from tests.support.made_completions import HOSTILE, completion_group, spec
from tests.support.patience import in_time
from tests.support.tiers import examples, slow_after


@pytest.fixture(scope="module")
def pool() -> Iterator[GraderPool]:
    with GraderPool(2, timeout_s=2.0, memory_mb=512) as pool:
        yield pool


def test_hostile_answers_cost_their_own_reward_only(pool: GraderPool) -> None:
    """Each one is graded between a correct and a wrong plain answer, in a shuffled order."""
    names = random.Random(0).sample(sorted(HOSTILE), len(HOSTILE))
    pairs = [p for n in names for p in ((HOSTILE[n], "12345"), ("\\boxed{7}", "7"), ("\\boxed{8}", "7"))]
    grades = in_time(pool, lambda: pool.grade(pairs), lambda grades: [*grades[1::3], *grades[2::3]])
    assert [g.outcome for g in grades[1::3]] == ["correct"] * len(names)
    assert [g.outcome for g in grades[2::3]] == ["wrong"] * len(names)
    unscored = {name: g for name, g in zip(names, grades[::3], strict=True) if not g.reward <= 0}
    for name, grade in unscored.items():
        assert math.isnan(grade.reward) and grade.outcome in ("timeout", "error"), name


PIECES = st.sampled_from([
    "\\boxed{", "}", "{", "(", ")", "[", "]", "\\frac", "\\sqrt", "\\left(", "\\right)", "^", "_", "!",
    "+", "-", "=", "<", ",", ";", "\\,", "&", "\\\\", "1", "22", "0.5", "x", "\\pi", "\\infty",
    "\\text{cm}", "\\%", "$", "$$", "\\begin{pmatrix}", "\\end{pmatrix}", "\\cup", "\\int", "\\sum",
    "\\log", "'", '"', "\n", "\u0000", "é", "\\fbox", "<think>", "</think>", "<answer>", "</answer>",
])  # fmt: skip


@settings(max_examples=examples(20, 60))
@given(st.lists(PIECES, max_size=40), st.lists(PIECES, max_size=10), st.text(max_size=40))
def test_any_text_and_any_gold_get_a_grade(
    pool: GraderPool, pieces: list[str], gold: list[str], text: str
) -> None:
    completion, answer = "".join(pieces), "".join(gold)
    pairs = [(completion, "7"), (text, "7"), (f"{text}\\boxed{{{completion}}}", answer), ("\\boxed{7}", "7")]
    *others, plain = in_time(pool, lambda: pool.grade(pairs), lambda grades: grades[-1:])
    assert plain.outcome == "correct"
    for grade in others:
        assert math.isnan(grade.reward) == (grade.outcome in ("timeout", "error"))
        assert grade.outcome != "error", grade.detail


KINDS = ("math", "format", "exact", "numeric", "repetition", "language", "overlong", "cosine_length")
SETTINGS = {"language": {"scripts": ["latin"]}, "overlong": {"buffer_tokens": 20}, "repetition": {"n": 4}}
GROUP = ("the sum is \\boxed{7}", "", "the sum is \\boxed{8}")


def scored(pool: GraderPool, text: str) -> Scores:
    group = (GROUP[0], text, GROUP[2])
    batch = completion_group(group, "7", lengths=[9, 50, 9], columns={"problem": "What is 3+4?"})
    scorer = Scorer([spec(kind, kind, kwargs=SETTINGS.get(kind)) for kind in KINDS], pool)
    return in_time(pool, lambda: scorer.score(batch), lambda scores: [scores.outcomes[0], scores.outcomes[2]])


@pytest.fixture(scope="module")
def calm(pool: GraderPool) -> Scores:
    """Return the scores next to a harmless answer."""
    return scored(pool, "seven")


def check_unharmed(pool: GraderPool, calm: Scores, text: str) -> None:
    """Check that the other rewards equal those next to a harmless answer; the hostile one may be unscored."""
    scores = scored(pool, text)
    for kind in KINDS:
        before, after = calm.parts[kind], scores.parts[kind]
        assert [after[0], after[2]] == [before[0], before[2]], kind
    assert [scores.outcomes[0], scores.outcomes[2]] == ["correct", "wrong"]


@pytest.mark.parametrize("name", slow_after([(name,) for name in sorted(HOSTILE)], 4))
def test_a_hostile_answer_changes_no_reward_of_another_answer(
    pool: GraderPool, calm: Scores, name: str
) -> None:
    check_unharmed(pool, calm, HOSTILE[name])


@settings(max_examples=20)
@given(text=st.lists(PIECES, max_size=60).map("".join) | st.text(max_size=300), thought=st.booleans())
def test_no_text_changes_the_rewards_of_another_answer(
    pool: GraderPool, calm: Scores, text: str, thought: bool
) -> None:
    check_unharmed(pool, calm, f"<think>t</think>{text}" if thought else text)
