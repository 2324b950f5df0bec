"""The math grader on multiple choice: the letter counts in any markup."""

import re
import time

import pytest

from grpo_dist.rewards.choice import marked_option, stated_choice
from grpo_dist.rewards.math import extract_answer, grade
from tests.support.patience import HANG_S

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


REPEATED = [
    ("557", "\\textbf{(D)}\\ 557"), ("557", "\\text{(D) }557"), ("557", "(D) 557"),
    ("557", "\\textbf{(D)}~557"), ("\\frac{1}{2}", "\\textbf{(C)}\\ \\frac12"),
    ("-12", "\\mathrm{(D)}\\ -12"), ("50", "\\textbf{(E)}\\ 50\\%"), ("5", "\\text{Option B: } 5"),
    ("5\\text{ cm}", "\\text{(B) 5 cm}"), ("D", "\\textbf{(D)}\\ 557"), ("B", "\\text{(B) } 5"),
    ("B", "\\text{B) } 5"), ("B", "B. 5"), ("B", "\\text{B. 5}"), ("(B)", "\\text{Option B}"),
    ("B", "\\text{Choice B}"), ("12D", "(D) 12"),
    ("C", "\\textbf{(C)}\\ (3,5)"), ("(3,5)", "\\textbf{(C)}\\ (3,5)"), ("B", "(B)\\ |x|"),
    ("|x|", "(B)\\ |x|"),
    ("B", "\\text{(B) The ball and the bat}"), ("B", "B. It does not change"), ("B", "B. It doesn't change"),
    ("D", "(D)\\ 3 \\text{ and } 4"), ("3, 4", "(D)\\ 3 \\text{ and } 4"), ("D", "D. None of these"),
    ("D", "\\text{(D) Not enough information}"),
]  # fmt: skip
NOT_REPEATED = [
    ("13", "\\textbf{(D)}\\ 12"), ("B", "\\textbf{(D)}\\ 12"), ("B", "\\text{A. B}"),
    ("12", "(D) 12\\text{ or }13"), ("12", "\\text{(D) } 12\\text{ or more}"), ("B", "\\text{(B) or (C)}"),
    ("B", "(B), (C)"), ("B", "(B) C"), ("B", "\\text{not (B)}"), ("A", "(A) + 1"), ("A", "(A)^2"),
    ("A", "(A)-1"), ("1", "(A)-1"), ("5", "(A) \\cdot 5"), ("5\\text{ cm}", "(B) 5\\text{ in}"),
    ("579", "\\textbf{(D)}\\ 123 + 456"), ("5", "\\textbf{(D)}"),
    ("A", "(A) \\text{ or } (B)"), ("A", "(A)(B)"), ("A", "(A)(3,5)"), ("A", "(A)|x|"),
    ("A", "(A) \\text{ or } B"), ("A", "(A) 5 \\text{ or } B"), ("A", "\\text{(A) 5, or maybe option B}"),
    ("A", "\\text{(A) 5, not B}"),
    ("A", "\\text{(A) is not right}"), ("A", "\\text{(A) isn't right}"), ("A", "(A) \\text{ and more}"),
    ("3", "(D)\\ 3 \\text{ and } 4"), ("4", "(D)\\ 3 \\text{ and } 4"), ("A", "(A) | B"),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "box"), REPEATED)
def test_an_option_may_be_repeated_with_its_letter(gold, box):
    assert grade(f"so \\boxed{{{box}}}.", gold).outcome == "correct"


@pytest.mark.parametrize(("gold", "box"), NOT_REPEATED)
def test_a_letter_in_front_makes_no_other_answer_right(gold, box):
    """The letter counts for a gold that is a letter, and what the option says for any other: never both."""
    assert grade(f"so \\boxed{{{box}}}.", gold).outcome == "wrong"


def test_the_mark_of_an_option():
    assert marked_option("\\textbf{(D)}\\ 5\\text{ cm}") == ("D", "5\\text{ cm}")
    assert marked_option("\\text{Option B}") == ("B", "")
    for other in ("5", "(A, B)", "(a) 5", "A5", "Option Best", "f(A) 5", "(K) 5", "A.5"):
        assert marked_option(other) is None


STATED = [
    "The answer is B", "The answer is B.", "The answer is (B).", "the answer is (b)", "Answer: B",
    "ANSWER: B.", "**Answer: B**", "**Answer:** B", "Answer: **(B)**", "The correct option is \\textbf{(B)}.",
    "The answer is $B$.", "The correct choice is option B.", "The answer is B) 5 cm",
    "The answer is (B) Paris.", "The answer is B: Paris",
    "A is too small. So the answer is B, because 3 < 4.", "The answer is B since C is odd.",
    'The answer is "B".', "The answer is A. Let me check: 2+2=4. Therefore, the answer is B.",
    "The final answer is \\(B\\).", "The answer would be B\n", "The answer is Ｂ。",
    "I doubt A. The answer is B.", "The answer is b.", "If x = 3, then 2x = 6, so the answer is B.",
    "If n is odd, n + 1 is even; therefore, the answer is (B).", "It can't be A, so the answer is B.",
    "Since A and C are not possible, the answer is B.", "Because it is not prime, the correct option is (B).",
    "As x is never negative, the answer must be B.", "And since the sum isn't 4, the correct answer is B.",
    "The answer is therefore B.", "The answer is, thus, (B).", "The answer is clearly B",
    "The correct answer has to be B.", "(B) is the correct answer.", "Option B is the correct choice.",
    "**B** is therefore the right answer.", "C is wrong. B is the correct answer: 5 cm",
    "The answer is A? Let me see. B is the only correct option.",
    "Since there were 5 apples, the answer is (B).", "There were 12 left, so the answer is (B).",
    "The problem says x = 2, so the answer is (B).", "The problem also says x = 2, so the answer is (B).",
    "As we were told, the answer is (B).", "By this argument, the answer is (B).",
    "B is the correct answer. When x = 3, it holds.",
]  # fmt: skip
# What public evaluations extract, by their regular expressions (simple-evals `common.py`, MMLU-Pro
# `compute_accuracy.py`); hedged statements are in `NOT_STATED`.
EXTRACTED = {
    r"(?i)Answer[ \t]*:[ \t]*\$?([A-D])\$?": ["Answer: B", "answer : $B$", "ANSWER:B", "x = 1\n\nAnswer: B"],
    r"answer is \(?([A-J])\)?": ["the answer is (B)", "The correct answer is B.",
     "So the answer is (B) 3 m."],
    r".*[aA]nswer:\s*([A-J])": ["Final answer: B", "My answer:\nB", "Answer:   B."],
}  # fmt: skip
NOT_STATED = [
    "The answer is B or C.", "The answer is B and C", "The answer is B, C", "The answer is (B), (C)",
    "The answer is B/C", "The answer is either B or C", "The answer is not B.", "The answer isn't B",
    "I don't think the answer is B.", "The wrong answer is B.", "If the answer is B, then x = 3.",
    "The answer is B? No.", "Is the answer is B?", "The answer is B is what a fool says",
    "The answer is B. No, wait.", "The answer is B... Actually it is C", "The answer is B. Sorry, C.",
    "The answer is A. But the answer is unclear.", "The answer is", "Options: A) 3 B) 4",
    "The answer is Brazil", "The answer is B^2", "The answer is B'", "The answer is B + 1",
    "The answer is B = 4", "Choose B", "It is not true that the answer is B",
    "Whether the answer is B depends", "B_1: the answer is B_1", "The answer is B-C",
    "The answer is (B) is wrong", "The answer is B to D", "the answer is B unless it is C",
    "If x = 3, the answer is B.", "Suppose x = 3, so the answer is B.",
    "Assume that A is false, so the answer is B.", "Bob says x = 3, so the answer is B.",
    "One might think x = 3, so the answer is B.", "x = 3, so the answer is not B.",
    "x = 3, so if y = 1 the answer is B.", "Since x = 3, the answer isn't B.",
    "x = 3, which would mean the answer is B.", "A or B is the correct answer.",
    "Neither A nor B is the correct answer.", "If x = 3, B is the correct answer.",
    "It is not clear that B is the correct answer.", "Is it true that B is the correct answer?",
    "B is the correct answer? No.", "B is the correct answer. Wait, no, C.", "x > B is the correct answer",
    "B is not the correct answer.", "The student thought B is the correct answer.",
    "f(B) = B is the correct answer", "As x is unknown and if it is 2, the answer is (B).",
    "B is the correct answer only if x > 3.", "B is the correct answer when x > 3.",
    "If there were 5 apples, 2 are left, so the answer is (B).", "Bob also said x = 3, so the answer is B.",
    "The teacher believes x = 3, so the answer is B.", "One could argue x = 3, so the answer is B.",
]  # fmt: skip


@pytest.mark.parametrize("text", STATED)
def test_a_sentence_that_states_a_letter_needs_no_box(text):
    assert grade(text, "B").outcome == grade(text, "(B)").outcome == "correct"
    assert grade(text, "C").outcome == "wrong"
    assert stated_choice(text) == "B"


@pytest.mark.parametrize("text", NOT_STATED)
def test_a_sentence_that_hedges_negates_or_takes_back_states_nothing(text):
    assert stated_choice(text) is None
    assert grade(text, "B").outcome != "correct"


@pytest.mark.parametrize("pattern", EXTRACTED)
def test_what_public_evaluations_extract_from_plain_statements_is_extracted_here(pattern):
    for text in EXTRACTED[pattern]:
        assert re.findall(pattern, text)[-1] == stated_choice(text) == "B", text


def test_an_article_or_a_variable_is_no_option():
    articles = "The answer is a positive number.", "The answer is a", "The answer is A positive number"
    for text in (*articles, "answer: i"):
        assert stated_choice(text) is None
    assert stated_choice("The answer is (a).") == stated_choice("The answer is A.") == "A"


def test_only_golds_that_are_options_are_compared_with_a_stated_letter():
    assert grade("The answer is x.", "y").outcome == "no_answer"
    assert grade("The answer is B.", "Bob").outcome == "no_answer"
    assert grade("The answer is \\boxed{C}. The answer is B.", "B").outcome == "wrong"  # a box comes first
    assert grade("<think>The answer is B.", "B").outcome == "no_answer"
    assert extract_answer("So the answer is (B).") == "B"


def test_long_texts_are_searched_in_linear_time():
    begin = time.monotonic()
    pieces = (
        "answer is ",
        "answer: (((((",
        "the answer is **",
        "answer is B or ",
        "\\text{" * 3,
        "answer " * 5,
    )
    for piece in pieces:
        assert stated_choice(piece * 20_000) is None
    assert time.monotonic() - begin < HANG_S


def test_a_letter_alone_needs_no_box():
    assert grade("(B)", "B").outcome == "correct"


@pytest.mark.parametrize(
    "answer", ["(B) Paris", "B. Paris", "B) 5", "Option B", "B. 5", "B: 5", "\\text{(B) } 5"]
)
def test_an_option_in_answer_tags_may_be_repeated_with_its_letter(answer):
    outcomes = [grade(f"<answer>{answer}</answer>", gold).outcome for gold in ("B", "(B)", "C")]
    assert outcomes == ["correct", "correct", "wrong"]


@pytest.mark.parametrize("answer", ["(B) or (C)", "(B) C", "not (B)", "B^2", "(B), (C)"])
def test_several_options_in_answer_tags_are_none(answer):
    assert grade(f"<answer>{answer}</answer>", "B").outcome != "correct"
