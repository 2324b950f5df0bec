"""The math grader on multiple choice: the letter counts in any markup."""

import pytest

from grpo_dist.rewards.math import grade

LETTERS = "ABCDE"
DRESSES = [
    "{}", "({})", "{})", "{}.", "[{}]", "\\text{{{}}}", "\\text{{({})}}", "\\textbf{{({})}}",
    "\\textbf{{({}) }}", "\\mathrm{{{}}}",
]  # fmt: skip


@pytest.mark.parametrize("gold", ["{}", "({})", "\\text{{{}}}", "\\textbf{{({})}}"])
@pytest.mark.parametrize("dress", DRESSES)
def test_a_letter_is_correct_in_any_markup(gold, dress):
    for letter in LETTERS:
        completion = f"so \\boxed{{{dress.format(letter)}}}."
        assert grade(completion, gold.format(letter)).outcome == "correct"
        assert grade(completion.replace(letter, letter.lower()), gold.format(letter)).outcome == "correct"


@pytest.mark.parametrize("dress", DRESSES)
def test_another_letter_is_wrong(dress):
    for right in LETTERS:
        for other in LETTERS.replace(right, ""):
            assert grade(f"\\boxed{{{dress.format(other)}}}", right).outcome == "wrong"


@pytest.mark.parametrize("box", ["A, B", "AB", "A \\text{ or } B", "", "F", "8"])
def test_several_letters_or_none_are_wrong(box):
    assert grade(f"\\boxed{{{box}}}", "B").outcome == "wrong"


def test_a_letter_alone_needs_no_box_and_a_sentence_does():
    assert grade("(B)", "B").outcome == "correct"
    assert grade("The answer is (B).", "B").outcome == "no_answer"
