"""Comparison with the gold as text and as a number."""

import math
import time

import pytest

from grpo_dist.rewards.match import exact_match, final_answer, last_number, numeric_match


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("\\boxed{1} and then \\boxed{ 2 }.", "2"), ("<answer>3</answer> or <answer> 4 </answer> bye", "4"),
        ("first\nlast line \n\n", "last line"), ("<answer>", "<answer>"), (" \n ", ""),
        ("<think>\\boxed{8}?</think>No,\nit is 7.", "it is 7."),
        ("\\boxed{8}?</think><answer>7</answer>", "7"), ("so \\boxed{8}</think>\n", "8"),
    ],
)  # fmt: skip
def test_the_final_answer(completion, answer):
    assert final_answer(completion) == answer


@pytest.mark.parametrize(
    ("completion", "gold", "ignore_case", "expected"),
    [
        ("so \\boxed{New  York.}", "new york", True, 1.0),
        ("so \\boxed{New York}", "new york", False, 0.0),
        ("so \\boxed{0.50}", "0.5", True, 0.0),
        ("thought\n$5$", "5", False, 1.0),
        ("thought\n\\(5\\).", "\\boxed{5}", False, 1.0),
        ("\\boxed{B}", "b", True, 1.0),
        ("\\boxed{５}", "5", False, 1.0),  # full width
        ("", "", True, 0.0),
        ("$", "$$", True, 0.0),
    ],
)
def test_exact_match(completion, gold, ignore_case, expected):
    assert exact_match(completion, gold, ignore_case=ignore_case) == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234", 1234.0), ("1{,}234", 1234.0), ("\\$1,234,567.50$", 1234567.5), ("1, 2", 2.0),
        ("12,34", 34.0),
        ("1\\,234", 1234.0), ("-12\\,345\\,678.5", -12345678.5), ("1\u202f234", 1234.0), ("12\\,34", 34.0),
        ("x_1\\,234", 234.0), ("10^2\\,345", 345.0), ("(1,2\\,345)", 2345.0), ("1 234", 234.0),
        ("\\frac{1}{2}", 0.5), ("-\\dfrac{1}{2}", -0.5), ("\\frac{-1}{2}", -0.5), ("x_1 = -3/4", -0.75),
        ("10\\text{ cm}^2", 10.0), ("10^{5}", 1e5), ("1e-3", 0.001), ("2.5E3.", 2500.0), ("50\\%", 50.0),
        ("f(2)=−7", -7.0), (".5", 0.5), ("- 42 apples", -42.0), ("5-3", 3.0),
        ("3 \\times 10^{8}", 3e8), ("7\\cdot10^2", 700.0), ("1.5 × 10⁻³", 0.0015), ("2*10^3", 2000.0),
        ("10^{-2}", 0.01), ("1/10^{2}", 0.01), ("2e3 \\times 10^{2}", 2e5), ("6 \\times 10", 10.0),
        ("3 \\times 10^{8}\\text{ m/s}", 3e8), ("10^{n}", 10.0), ("30^\\circ", 30.0), ("x^{10^{2}}", None),
        ("-\\$5", -5.0), ("-$5", -5.0), ("\\$-5", -5.0), ("- 3", -3.0), ("x = - 3", -3.0), ("−£ 5", -5.0),
        ("10 - 3", 3.0), ("x - 3", 3.0), ("(1) - 3", 3.0), ("$5$ - 3", 3.0), ("$- 3$", -3.0), ("3-\\$5", 5.0),
        ("10 + 3", 3.0), ("= + 3", 3.0), ("it is -3", -3.0),
        ("3 1/2", 3.5), ("3\\frac{1}{2}", 3.5), ("-3\\,\\tfrac12", -3.5), ("3½", 3.5), ("x_3 \\frac12", 0.5),
        ("3, 1/2", 0.5), ("3 11/2.5", 4.4), ("2\\frac12 \\times 10^{3}", 2500.0),
        ("Total: 12\n3/4", 0.75), ("The sides are 5\n\n1/2", 0.5), ("12\n\\frac{3}{4}", 0.75),
        ("5 7/2", 3.5), ("-5 7/2", 3.5), ("5\\frac{7}{2}", 3.5), ("5 2/2", 1.0), ("-3 1/2", -3.5),
        ("The profit is -$5", -5.0), ("so it changed by -$1,250.", -1250.0), ("it is~-\\$ 5", -5.0),
        ("\\text{loss of } -\\$5", -5.0), ("10 - \\$3", 3.0), ("10\\ -\\ \\$3", 3.0),
        ("\\frac12", 0.5), ("\\frac 1{20}", 0.05), ("\\frac{3.5}{2}", 1.75), ("\\frac{1,000}{8}", 125.0),
        ("\\frac{1}{-2}", -0.5), ("\\cfrac34", 0.75), ("3\\frac{1}{0}", None),
        ("abc", None), ("a2", None), ("3/0", None), ("9" * 400, None), ("", None),
    ],
)  # fmt: skip
def test_the_last_number(text, value):
    assert last_number(text) == (value if value is None else pytest.approx(value, rel=1e-12))


def test_a_dash_before_a_line_of_prose_is_no_sign():
    assert last_number("The parts:\n- 42 apples", prose=True) == 42.0
    assert last_number("The parts:\n-42 apples", prose=True) == -42.0
    assert last_number("In all = - 42", prose=True) == -42.0


def test_numbers_are_found_in_time_that_grows_with_the_text():
    begin, spaces = time.process_time(), " " * 20_000
    for text in (f"-{spaces}", "1 " * 10_000, "7" * 20_000, f"1{spaces}", "- " * 10_000, "111\\," * 4_000):
        last_number(text, prose=True)
    assert time.process_time() - begin < 5.0


@pytest.mark.parametrize(
    ("completion", "gold", "expected"),
    [
        ("that makes 1,234 apples in all", "1234", 1.0),
        ("they are 7.\nDone, friends!", "7", 1.0),  # the last line has no number
        ("\\boxed{\\frac{1}{3}}", "0.33334", 1.0),  # apart by 6.7e-6, allowed 3.3e-5
        ("\\boxed{\\frac{1}{3}}", "0.3334", 0.0),  # apart by 6.7e-5
        ("7 \\boxed{seven}", "7", 0.0),  # the box is the answer
        ("\\boxed{1e-9}", "0", 1.0),  # the absolute tolerance
        ("\\boxed{1e-3}", "0", 0.0),
        ("no idea", "7", 0.0),
        ("\\boxed{7 \\times 10^{2}}", "3 \\times 10^{8}", 0.0),
        ("\\boxed{300000000}", "3 \\times 10^{8}", 1.0),
        ("\\boxed{1\\,234}", "1234", 1.0),
        ("\\boxed{5}", "-\\$5", 0.0),
        ("\\boxed{- 3}", "-3", 1.0),
        ("<answer>- 3</answer>", "3", 0.0),
        ("It has:\n- 3 apples", "3", 1.0),  # an item of a list
        ("\\boxed{1/2}", "3 1/2", 0.0),
    ],
)
def test_numeric_match(completion, gold, expected):
    assert numeric_match(completion, gold, relative=1e-4, absolute=1e-6) == expected


def test_a_gold_without_a_number_is_unscored():
    assert math.isnan(numeric_match("\\boxed{7}", "seven", relative=1e-4, absolute=0.0))


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("<think>First guess \\boxed{8}.</think>No, the answer is 7.", 0.0),
        ("<think>8 is my guess</think>I do not know.", 0.0),
        ("<think>7?</think>It is 8.", 1.0),
        ("<think>so \\boxed{8}</think>", 1.0),
    ],
)
def test_numbers_of_a_closed_thought_count_only_where_nothing_follows(completion, expected):
    assert numeric_match(completion, "8", relative=0, absolute=0) == expected
