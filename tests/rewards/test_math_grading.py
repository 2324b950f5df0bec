"""The math grader: correct and wrong answers; no answer is evaluated as Python."""

import math
import re
import threading
from dataclasses import replace
from unittest.mock import Mock

import pytest
import sympy.parsing.sympy_parser
import sympy.physics.units  # evaluates names of units when it is imported, which sympy does late

from grpo_dist.config import RewardsConfig
from grpo_dist.rewards import math as grader
from grpo_dist.rewards.format import think_answer_format
from grpo_dist.rewards.group import Verdicts
from grpo_dist.rewards.math import Grade, extract_answer, gold_is_parsable, grade
from grpo_dist.rewards.pool import GraderPool
from grpo_dist.rewards.text import boxes, normalise
from grpo_dist.types import Thought
from tests.evidence.grading import graded_solutions, judge_with_ours, read_cases, summary
from tests.support.made_completions import completion_group
from tests.support.patience import HANG_S

# (gold, what is in the box)
RIGHT = [
    ("\\frac{1}{2}", "0.5"), ("1/3", "\\frac13"), ("x", "x."), ("30", "30°"), ("30^\\circ", "30"),
    ("\\frac{\\pi}{6}", "30^{\\circ}"), ("6", "6 dollars"), ("5", "\\$5.00"), ("10", "10\\text{ cm}"),
    ("10\\text{ cm}", "10\\ \\mathrm{cm}"), ("10\\text{ cm}", "10 centimeters"),
    ("30^\\circ", "30\\text{ degrees}"), ("28\\%", "28\\text{ percent}"), ("1000", "1\\,000"),
    ("7425000", "7,425,000"), ("28\\%", "28"), ("28\\%", "0.28"), ("0.9", "90 percent"),
    ("\\frac{1}{6}", "0.1\\overline{6}"), ("\\frac13", "0.333..."), ("1+2i", "2\\mathrm{i}+1"),
    ("-1", "e^{i\\pi}"), ("-i", "\\frac{1}{i}"), ("x", "-(-x)"), ("x-1", "-(-x+1)"), ("-4", "-(-2)^2"),
    ("52_8", "52_{8}"), ("52_8", "52_{\\text{eight}}"), ("\\frac{11}{4}", "2 3/4"), ("3.5", "3½"),
    ("3.5", "3\\frac{1}{2}"), ("x^{10}", "x¹⁰"), ("2\\pi", "2 pi"), ("3\\sqrt{2}", "3 sqrt(2)"), ("x=5", "5"),
    ("5", "x = 5"), ("x=1, y=2", "y=2, x=1"), ("1, 2", "x=1, y=2"), ("f(t)=t^2", "f(x)=x^2"),
    ("(-\\infty, -5)", "k < -5"), ("[-2,7]", "-2 \\le x \\le 7"), ("(2,\\infty)", "(2,+\\infty)"),
    ("\\{1,2\\}", "2, 1"), ("(1,2)", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"), ("\\text{C}", "(C)"),
    ("no solution", "\\text{No solutions}"), ("line segment, circle", "\\text{line segment and circle}"),
    ("\\text{Sunday}", "sunday"), ("5", "٥"), ("-5", "−5"), ("2^{1000}", "4^{500}"), ("120", "5!"),
    ("\\frac{3}{2}n + \\frac{1}{2}m", "\\frac{3n+m}{2}"), ("\\gcd(18, 3)", "\\operatorname{gcd}(18, 3)"),
    ("15th day", "15"), ("28\\%", "28 \\%"),
]  # fmt: skip

WRONG = [
    ("8", "9"), ("1.6\\times 10^{-19}", "1.7\\times 10^{-19}"), ("\\frac{1}{2^{99}}", "\\frac{1}{2^{98}}"),
    ("0.0000001", "0.0000002"), ("10^{-8}", "0"), ("(0.0000001, 1)", "(0.0000002, 1)"),
    ("\\{0.0000001, 1\\}", "\\{0.0000002, 1\\}"), ("1000001", "1000000"), ("1/3", "0.333"), ("52_8", "52_9"),
    ("52_8", "52_{\\text{nine}}"), ("528", "52₈"), ("28\\%", "2800\\%"), ("28", "0.28"), ("5", ".5"),
    ("12", "1 2"), ("\\frac{23}{4}", "2 3/4"), ("x^{\\frac{5}{2}}", "x^2\\frac{1}{2}"), ("x+1", "-(-x+1)"),
    ("4", "-(-2)^2"), ("b", "a b"), ("12", "12xy"), ("3", "3 million"), ("2", "2 pi"), ("5", "5 or 6"),
    ("3", "3 apples and 4 pears"), ("10\\text{ cm}", "10\\text{ m}"), ("10\\text{ cm}", "10\\text{ inches}"),
    ("20\\text{ days}", "20\\text{ miles}"), ("40^\\circ", "40_9"), ("75\\%", "75^\\circ"), ("x=5", "y=5"),
    ("x=1, y=2", "y=1, x=2"), ("(1,2)", "(2,1)"), ("[1,2)", "[1,2]"), ("\\{1,2\\}", "\\{1,2,3\\}"),
    ("x \\geq 5", "x \\leq 5"), ("5", "4 \\approx 5"), ("3+4i", "4+3i"), ("5", ""),
    ("5", "\\text{five or so}"), ("\\text{C}", "D"), ("2^{2025}", "2^{2024}"),
    ("\\frac{3}{2}n + \\frac{1}{2}m", "\\frac{3n+1}{2}"), ("f(x)=x+1", "g(x)=x+1"),
]  # fmt: skip


ARITHMETIC = [
    ("8", "3+5"), ("0.1", "0.3-0.2"), ("2.4", "0.8*3"), ("579", "123+456"), ("145", "290/2 + 0"),
    ("145", "2 \\cdot \\frac{145}{2}"), ("579", "x = 123+456"), ("579", "(123+456)^1"),
    ("579", "\\sqrt{(123+456)^2}"), ("8", "2\\cdot 2 \\times 2"), ("-1", "3–4"), ("1,000", "10*100"),
    ("5\\text{ cm}", "2+3\\text{ cm}"), ("7", "14 ÷ 2 + 0"), ("145", "\\frac{200+90}{2}"),
    ("5", "\\max(3,5)"), ("6", "\\gcd(12,18)"), ("12", "\\operatorname{lcm}(4,6)"),
    ("5050", "\\sum_{i=1}^{100} i"), ("24", "\\prod_{k=1}^{4} k"), ("5", "\\lfloor 5.5\\rfloor"),
    ("6", "\\left\\lceil 5.5\\right\\rceil"), ("3", "\\log_{10}1000"), ("120", "\\binom{10}{3}"),
    ("120", "\\dbinom{10}{3}"), ("120", "{10 \\choose 3}"), ("123", "\\sqrt{123^2}"),
    ("2", "\\sqrt{\\sqrt{16}}"), ("5", "(\\sqrt{5})^2"), ("3", "\\ln e^3"), ("2", "17 \\bmod 5"),
    ("5", "3^{2021} \\bmod 7"), ("-2", "\\begin{vmatrix}1&2\\\\3&4\\end{vmatrix}"), ("-2", "i^{22}+i^{222}"),
    ("0", "e^{i\\pi}+1"), ("x=579", "123+456"), ("x_{1}=579", "x_{1}=123+456"), ("5,4", "2+3, 4"),
    ("(5,4)", "(5, 2+2)"),
    ("x=5 \\text{ or } x=4", "x=2+3 \\text{ or } x=4"), ("\\frac13", "\\int_0^1 x^2 dx"),
    ("\\frac23", "\\lim_{x\\to 0}\\frac{\\sin 2x}{3x}"),
    ("\\frac{n(n+1)}{2}", "\\sum_{k=1}^{n} k"), ("S=\\frac34", "S=\\sum_{n=1}^\\infty \\frac{1}{n(n+2)}"),
    ("3y+1", "\\begin{vmatrix}y+1&y&y\\\\y&y+1&y\\\\y&y&y+1\\end{vmatrix}"),
    ("\\begin{pmatrix}3\\end{pmatrix}",
     "\\begin{pmatrix}1&2\\end{pmatrix}\\begin{pmatrix}1\\\\1\\end{pmatrix}"),
]  # fmt: skip
WORKED_OUT = [
    ("3", "\\frac{6}{2}"), ("617", "1,234/2"), ("1500", "1.5 \\times 10^3"), ("2.75", "2\\frac{3}{4}"),
    ("0.5", "\\frac{1}{2}"), ("0.5", "2/4"), ("120", "5!"), ("1024", "2^{10}"), ("-4", "-(-2)^2"),
    ("5", "2+3=5"), ("5", "x=5"), ("3/2", "2\\cdot 3/4"), ("x+3", "x+1+2"), ("5", "\\sqrt{25}"),
    ("579", "1158/2"), ("120", "\\binom{10}{3} = 120"), ("5", "x_{\\max} = 5"), ("5", "x_{\\text{max}} = 5"),
    ("5", "|-5|"), ("\\binom{10}{3}", "120"), ("\\log_2 3", "\\log_2 3"),
    ("\\frac{5}{6}", "\\frac{1}{2}+\\frac{1}{3}"), ("1", "\\sin{\\frac{\\pi}{2}}"), ("x=5", "2+3=5"),
    ("x=5", "\\sqrt{25}"), ("5, 2.5", "5, 2\\frac12"), ("5,3", "\\frac{10}{2}, 3"),
    ("\\frac{n(n+1)}{2}", "\\sum_{k=1}^n k = \\frac{n(n+1)}{2}"), ("0.001", "1e-3"),
    ("5", "5\\text{ two-digit numbers}"),
]  # fmt: skip

# (gold, what is in the box): math-verify overlooks what makes them different
OTHER_MEANING = [
    *[
        ("5", f"5\\text{{ {words}}}")
        for words in (
            "million", "billion", "thousand", "hundred", "dozen", "trillion", "lakh", "million dollars",
            "squared", "cubed", "halves", "and a half", "or so", "or more", "or less", "is wrong",
            "is not the answer", "(or 6)", "apples, 6 pears", "times 2", "below zero", "fewer than 7", "?",
        )
    ],
    *[
        ("5", f"{sign} 5")
        for sign in (
            "\\neq", "\\ne", "\\not=", "\\not", "\\neg", "\\lnot", "≠", "!=", "=/=", ">", "<", "\\ge",
            "\\geq", "\\geqslant", "\\le", "\\leqslant", "\\gtrsim", "\\ll",
        )
    ],
    *[("\\frac{1}{2}", f"{sign} \\frac{{1}}{{2}}") for sign in ("\\neq", ">", "\\le")],
    *[
        ("5", f"\\{command}{{5}}")
        for command in ("cancel", "xcancel", "bcancel", "sout", "st", "not", "phantom")
    ],
    *[
        ("\\frac{1}{2}", f"\\{command}{{\\frac{{1}}{{2}}}}")
        for command in ("cancel", "sout", "enclose{horizontalstrike}", "cancelto{0}")
    ],
    *[("0.5", text) for text in ("\\cancel{\\frac{1}{2}}", "\\cancel\\frac{1}{2}")],
    *[("5", f"\\{command} 5") for command in ("cancel", "sout", "phantom", "cancelto 0")],
    *[
        ("5", text)
        for text in (
            "~~5~~", "5\u0336", "5\u0338", "\\cancelto{5}{3}", "\\propto 5", "\\equiv 5", "5?", "5 + ?",
        )
    ],
    *[
        ("3", text)
        for text in (
            "3\\text{, }4", "3\\text{ or 4 or 5}", "3\\text{ or }4", "3 \\lor 4", "3\\operatorname{or}4",
        )
    ],
    *[
        ("4", text)
        for text in (
            "3 \\& 4", "3 \\mid 4", "3 \\vee 4", "3 \\to 4", "3 \\rightarrow 4", "3 \\\\ 4", "3 \\lvert 4",
        )
    ],
    *[
        (gold, f"2{space}3")
        for gold in ("23", "5", "6", "2", "3")
        for space in ("\\quad ", "\\;", "\\ ", "~", "\\,")
    ],
    *[("11", text) for text in ("5 (6)", "5 \\text{ } 6")],
    ("56", "5 \\text{ } 6"), ("7", "5 \\bmod 7"), ("7", "\\equiv 5 \\pmod 7"), ("5", "500\\%"),
    ("5", "500\\text{ percent}"), ("5\\%", "500\\%"), ("5\\text{ million}", "5"), ("5", "\\infty"),
    ("\\infty", "5"), ("B", "\\text{not B}"), ("B", "\\cancel{B}"),
]  # fmt: skip
SAME_MEANING = [
    ("5", "\\text{The answer is 5}"), ("5", "5\\text{ squared units}"), ("5", "5\\text{ cubed centimeters}"),
    ("5000000", "5\\text{ million}"), ("5\\text{ million}", "5000000"), ("3200", "3.2 thousand"),
    ("60", "5\\text{ dozen eggs}"), ("5", "\\cancel{4} 5"), ("5", "\\cancel{\\frac{1}{2}} 5"),
    ("5", "\\cancel 4 5"), ("\\frac{1}{2}", "\\frac{1}{2} \\cancel{\\frac{1}{3}}"), ("5,6", "5 \\quad 6"),
    ("x=1, y=2", "x=1 \\quad y=2"), ("5,6,7", "5\\text{ or 6 or 7}"), ("500", "500\\%"), ("50", "50\\%"),
    ("0.5", "50\\%"), ("\\frac{1}{2}", "50\\%"), ("1", "100\\%"), ("12.5", "12.5\\%"), ("150\\%", "1.5"),
    ("15", "15\\text{ more apples}"), ("300", "300\\text{ K}"), ("11", "x \\approx 11"),
    ("(3,\\infty)", "x>3"), ("x \\ne 3", "x \\neq 3"),
    ("f(x)=1", "f(x) = 1 \\text{ for all } x \\in \\mathbb{Q}_{>0}"), ("\\infty", "\\text{infinity}"),
    ("\\text{infinitely many}", "\\infty"),
]  # fmt: skip


def boxed(text: str) -> str:
    return f"So the answer is $\\boxed{{{text}}}$."


MEASURED = [  # (value with a unit in text, value)
    ("5\\sqrt{2}\\text{ m}", "5\\sqrt2"), ("4\\pi\\text{ m}^2", "4\\pi"),
    ("10\\sqrt3\\text{ N}", "10\\sqrt3"),
    ("1\\frac12\\text{ h}", "1.5"), ("1.6\\times10^{-19}\\text{ C}", "1.6\\times10^{-19}"),
    ("25^\\circ\\text{C}", "25"),
    ("3.0\\times10^8\\mathrm{~m/s}", "3\\times10^8"), ("12 \\sqrt{3} \\mathrm{~cm}^{2}", "12\\sqrt{3}"),
    ("40 \\mathrm{~km} / \\mathrm{h}", "40"), ("10 \\mathrm{~m} / \\mathrm{s}^{2}", "10"),
    ("9.8\\ \\mathrm{m/s^2}", "9.8"),
    ("9.8\\,\\mathrm{m \\cdot s^{-2}}", "9.8"), ("12\\text{ N}\\cdot\\text{m}", "12"),
    ("2\\pi\\text{ rad/s}", "2\\pi"),
]  # fmt: skip
SAME_UNIT = [
    ("\\$5", "5"), ("\\$5", "5\\text{ dollars}"), ("5\\text{ dollars}", "\\$5.00"), ("5", "\\$5"),
    ("\\$12", "12\\text{ dollars per hour}"), ("\\$12\\text{ per hour}", "12"),
    ("\\$5\\text{ million}", "5000000"), ("100\\text{ cm}^2", "100"),
    ("100\\text{ cm}^2", "100\\text{ square centimeters}"), ("100", "100\\text{ cm}^3"),
    ("100\\text{ cm}^2", "100\\text{ sq. cm}"), ("5\\text{ cubic feet}", "5\\text{ ft}^{3}"),
    ("100\\text{ km/h}", "100\\text{ kilometers per hour}"), ("60\\text{ mph}", "60\\text{ mi/hr}"),
    ("9.8\\text{ m/s}^2", "9.8\\text{ m/s^2}"), ("10\\text{ mL}", "10\\text{ cm}^3"),
    ("10\\text{ cc}", "10\\text{ milliliters}"), ("7\\text{ m/s}^2", "7\\text{ m/s/s}"),
    ("7\\text{ m/s}^2", "7\\text{ meters per second per second}"), ("2\\text{ L}", "2\\text{ dm}^3"),
    ("18", "18 m/s"), ("60", "60 km/h"), ("9.8", "9.8 m/s^2"), ("60\\text{ km/h}", "60 km/h"),
    ("3\\text{ g/cm}^3", "3\\text{ kg/L}"), ("3\\text{ g/cc}", "3\\text{ g/mL}"),
    *[pair for text, gold in MEASURED for pair in ((gold, text), (text, gold))],
]  # fmt: skip
ANOTHER_UNIT = [
    ("\\$5", "5\\text{ cents}"), ("5\\text{ cents}", "\\$5"), ("\\$5", "5\\text{ hours}"),
    ("100\\text{ cm}^2", "100\\text{ cm}^3"), ("100\\text{ cm}^2", "100\\text{ cm}"),
    ("100\\text{ square feet}", "100\\text{ feet}"), ("100\\text{ km/h}", "100\\text{ m/s}"),
    ("100\\text{ miles per hour}", "100\\text{ km/h}"), ("9.8\\text{ m/s}^2", "9.8\\text{ m/s}"),
    ("10\\text{ mL}", "10\\text{ cm}^2"), ("10\\text{ mL}", "10\\text{ L}"),
    ("3\\text{ g/L}", "3\\text{ g/mL}"), ("7\\text{ m/s/s}", "7\\text{ m/s}"),
    ("5\\text{ days}", "5\\text{ weeks}"), ("18 m/s", "18 km/h"), ("2", "2m/g"),
    ("5\\sqrt2\\text{ m}", "5\\sqrt{2}\\text{ cm}"), ("4\\pi\\text{ m}", "4\\pi\\text{ m}^2"),
    ("40 \\mathrm{~m} / \\mathrm{s}", "40 \\mathrm{~km} / \\mathrm{h}"), ("2\\pi", "2\\pi\\text{ x}"),
    ("3\\sqrt2", "3\\sqrt2\\text{ i}"),
    ("5\\sqrt2", "5\\sqrt{2}\\text{ million}"), ("5\\sqrt2", "5\\sqrt3\\text{ m}"),
]  # fmt: skip
AFTERNOON = "4\\!:\\!51\\!:\\!06 \\text{ p.m.}"
SAME_COLONS = [
    ("05\\!:\\!00", "5:00"), ("2:3:5", "4:6:10"), ("3:4:5", "a:b:c=3:4:5"), ("1:2:3", "1 : 2 : 3"),
    *[(AFTERNOON, text) for text in ("4:51:06", "4:51:06 pm", "4:51:06\\text{ PM}", AFTERNOON)],
    ("8:34 p.m.", "8:34"), ("12:00", "12:00"), ("10:05", "10:05 am"), ("9\\text{ a.m.}", "9"), ("9", "9 am"),
    ("19:60", "19/60"), ("9:24", "3:8"), ("3:1", "3"), ("5:8", "\\frac58"), ("S:T=7:32", "7:32"),
]  # fmt: skip
OTHER_COLONS = [
    ("3:4:5", "3:5:4"), ("2:3:5", "2:5:3"), ("2:3:5", "4:6"), ("8\\!:\\!34 \\text{ p.m.}", "16:68"),
    *[(AFTERNOON, text) for text in ("4:51:06\\text{ a.m.}", "4:06:51\\text{ p.m.}", "4:51")],
    ("8:34 p.m.", "8:34 a.m."), ("10:30 am", "10:30 pm"), ("9\\text{ a.m.}", "9\\text{ p.m.}"),
]  # fmt: skip
EQUATIONS = [
    ("18", "m+n=18"), ("18", "S_{10}=18"), ("18", "f(2)=18"), ("18", "|AB|=18"), ("18", "xy=18"),
    ("18", "17+1=18"), ("18", "x^2=18"), ("18", "x=\\sqrt{324}=18"), ("0.33", "\\frac{1}{3}=0.33"),
    ("6", "\\sum_{k=1}^{3} 2 = 6"), ("18", "2\\frac{1}{4}\\cdot 8=18"),
    ("0.3", "0.1+0.2=0.3"), ("4035", "2018^2-2017^2=4035"), ("12", "3(4)=12"), ("12", "A = (3)(4) = 12"),
    ("4", "10-2(3)=4"), ("-2", "\\sqrt[3]{-8}=-2"), ("17", "50/3=17"),
    ("24", "A = \\frac{1}{2}(6)(8) = 24"),
    ("1/3", "0.3=1/3"), ("0", "0.1+0.2-0.3=0"), ("18", "18=18"), ("18", "x = 18 = +18"),
]  # fmt: skip
# Different whole numbers.
WRONG_EQUATIONS = [
    ("18", text) for text in ("17=18", "x=17=18", "17 = x = 18", "-18 = 18", "x = 17 = 17 = 18")
]
# Formulas with both cases of a letter.
BOTH_CASES = [
    ("\\frac{n}{N}", "n/N"), ("\\frac nN", "\\frac{n}{N}"), ("R-r", "-r+R"), ("3r^2", "3R^2"),
    ("a^2", "A=a^2"), ("A = a^2", "a^2"), ("R_1-r_1", "-r_1+R_1"), ("P(A)=2p", "2p"),
    ("2\\pi(R^2-r^2)", "2\\pi(R-r)(R+r)"), ("\\dfrac12 R r", "\\dfrac{Rr}{2}"),
    ("\\frac{mM}{M+m}", "\\frac{1}{\\frac1m+\\frac1M}"), ("e^{E}", "\\exp(E)"), ("x^N n", "n x^N"),
    ("\\vec{R}-r", "-r+\\vec{R}"), ("\\frac{\\sin A}{a}", "\\sin(A)/a"), ("E=mc^2", "mc^2"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("gold", "answer"),
    [*RIGHT, *WORKED_OUT, *SAME_MEANING, *SAME_UNIT, *SAME_COLONS, *EQUATIONS, *BOTH_CASES],
)
def test_an_equal_answer_in_other_notation_words_or_units_is_correct(gold: str, answer: str) -> None:
    assert grade(boxed(answer), gold) == Grade("correct", 1.0)


@pytest.mark.parametrize(
    ("gold", "answer"), [*WRONG, *OTHER_MEANING, *ANOTHER_UNIT, *OTHER_COLONS, *WRONG_EQUATIONS]
)
def test_another_answer_words_or_units_that_change_the_value_are_wrong(gold: str, answer: str) -> None:
    assert grade(boxed(answer), gold) == Grade("wrong", 0.0)


@pytest.mark.parametrize(("gold", "answer"), ARITHMETIC)
def test_unevaluated_arithmetic_is_wrong_unless_the_setting_allows_it(gold: str, answer: str) -> None:
    assert grade(boxed(answer), gold) == Grade("wrong", 0.0)
    assert grade(boxed(answer), gold, accept_arithmetic=True) == Grade("correct", 1.0)


UNBOXED_WRONG = [
    "The answer is 5 million.", "The final answer is $5$ million. I hope it is correct.",
    "The answer is $> 5$.", "The final answer is $\\neq 5$.", "The answer is not 5.",
    "The answer is at least 5", "The answer is 5 or 6.", "The final answer is 5 or 6 or 7.", "x > 5",
    "either 4 or 5", "4 to 5", "maybe 5", "5?", "5 squared", "The answer is 500%", "<answer>not 5</answer>",
    "<answer>5 million</answer>", "<answer>4 or 5</answer>", "<answer>> 5</answer>", "<answer>2+3</answer>",
    "<answer>~~5~~</answer>", "Answer: 2+3", "answer: $2\\quad 3$",
]  # fmt: skip


@pytest.mark.parametrize("completion", UNBOXED_WRONG)
def test_the_words_around_an_answer_without_a_box_count(completion: str) -> None:
    assert grade(completion, "5").outcome in ("wrong", "no_answer")


def test_plain_words_around_an_answer_without_a_box_do_not_count() -> None:
    in_words = "The answer is 5 apples and 3 pears", "<answer>The answer is 5.</answer>", "It is => 5", "> 5"
    for completion in in_words:
        assert grade(completion, "5").outcome == "correct"
    assert grade("The answer is 5 million.", "5000000").outcome == "correct"


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("\\frac{n}{N}", "1"), ("R-r", "0"), ("r-R", "R-r"), ("\\frac{A}{a}", "\\frac{a}{A}"), ("3a", "2a+A"),
        ("2a+A", "3a"), ("R_1-r_1", "r_1-R_1"),
    ],
)  # fmt: skip
def test_both_cases_of_a_letter_are_two_variables(gold: str, answer: str) -> None:
    assert grade(boxed(answer), gold).outcome == "wrong"
    assert grade(f"The answer is ${answer}$.", gold).outcome == "wrong"


NOT_THE_LAST_NUMBER = [  # (gold, an answer in tags that ends in the gold, or holds it)
    *[("18", f"{opening}17{sign} 18{closing}") for opening, closing in ("()", "[]", "{}") for sign in ",;"],
    *[("18", text) for text in ("17, 18", "17 18", "17; 18", "x=17, y=18", "x = 17 or x = 18", "1 : 18")],
    *[("18", text) for text in ("x + 18", "2x + 18", "x^2 + 18", "18 + x", "18x", "$17$, $18$")],
    ("2", "2\\pi"), ("2", "2π"), ("2", "2i"), ("2", "2 i"), ("2", "2 pi"), ("18", "18 x"), ("18", "18!"),
    ("x=5", "y = 5"),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "answer"), NOT_THE_LAST_NUMBER)
def test_an_answer_in_tags_counts_as_a_whole(gold: str, answer: str) -> None:
    assert grade(f"<answer>{answer}</answer>", gold).outcome == "wrong"
    assert extract_answer(f"<answer>{answer}</answer>") == answer


IN_TAGS = [
    ("\\frac{\\pi}{2}", "pi/2"), ("B", "B) 5"), ("5,1", "1, 5"), ("\\{1,2\\}", "\\{2, 1\\}"), ("x=5", "5"),
    *[("18", text) for text in ("**18**", "'18'", "\\[18\\]", "18 m/s", "18 V", "18 hours/day")],
    *[("18", text) for text in ("x = 18", "17 + 1 = 18", "Tom has 18", "Total: 18", "x is 18", "Rs 18")],
    *[("18", text) for text in ("18 °C", "18°F", "18 kJ", "18 MB", "18 mo", "18 pt", "18 cm3", "18 = x")],
    *[("18", text) for text in ("18 wk", "₹18", "¥18", "$18/hr", "$18 /h", "It's 18", "x: 18", "18=x")],
    ("18", "$18$ apples"), ("5i", "$5i$"), ("(17, 18)", "(17,18)"), ("2,018", "2018"),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "answer"), IN_TAGS)
def test_an_answer_in_tags_may_have_decoration_units_and_words(gold: str, answer: str) -> None:
    assert grade(f"<answer>{answer}</answer>", gold).outcome == "correct"


@pytest.mark.parametrize(
    ("answer", "gold", "part"),
    [
        ("2π", "2\\pi", "2"), ("18x", "18x", "18"), ("(17, 18)", "(17, 18)", "18"), ("5i", "5i", "5"),
        ("17, 18", "17, 18", "18"), ("2\\pi", "2\\pi", "2"), ("4\\sqrt{2}", "\\sqrt{32}", "4"),
    ],
)  # fmt: skip
def test_factors_and_lists_belong_to_an_answer_without_a_box(answer: str, gold: str, part: str) -> None:
    for completion in (f"The answer is {answer}.", f"#### {answer}"):
        assert grade(completion, part).outcome == "wrong"
        assert grade(completion, gold).outcome == "correct"


@pytest.mark.parametrize(
    "completion",
    [
        "The answer is 18m.", "#### 18km/h", "The answer is 18 a day.", "Total cost: 3, 18 each.",
        "In 2017, 18 came.", "The answer is 18th.",
    ],
)  # fmt: skip
def test_units_and_prose_around_an_answer_without_a_box_do_not_count(completion: str) -> None:
    assert grade(completion, "18").outcome == "correct"


def test_what_follows_a_number_that_the_parser_rewrites_counts() -> None:
    assert grade("The answer is .155.", ".155").outcome == "correct"
    assert grade("The answer is .5 million.", ".5").outcome == "wrong"


@pytest.mark.parametrize(
    "completion",
    [
        "<think>2+2 \\boxed{4}",
        "<THINK>\\boxed{4}",
        "<think>a</think><think>\\boxed{4}",
        "<think> The answer is $4$.",
    ],
)
def test_text_in_an_unclosed_thought_is_no_answer(completion: str) -> None:
    assert grade(completion, "4") == Grade("no_answer", 0.0)
    assert extract_answer(completion) is None


@pytest.mark.parametrize(
    ("completion", "gold", "outcome"),
    [
        # outside of an unclosed thought
        ("\\boxed{4}<think>or \\boxed{5}", "4", "correct"),
        ("<think>\\boxed{5}</think>\\boxed{4}", "4", "correct"),
        # the last box that is closed
        ("first \\boxed{3}, no: \\boxed{4}", "4", "correct"),
        ("first \\boxed{3}, no: \\boxed{4}", "3", "wrong"),
        ("\\boxed{4}, then a box that is cut off \\boxed{5", "4", "correct"),
        ("\\boxed{ never closed, but \\boxed{4} is", "4", "correct"),
        # the elements of a set, one by one
        ("Solutions: $\\boxed{2}$ and $\\boxed{3}$", "2, 3", "correct"),
        ("Solutions: $\\boxed{2}$ and $\\boxed{4}$", "2, 3", "wrong"),
        ("\\boxed{2, 3}", "\\boxed{2}, \\boxed{3}", "correct"),
        # without a box, the whole response
        ("The final answer is $\\frac{1}{2}$.", "0.5", "correct"),
        ("<think>3 or 4?</think><answer> 4 </answer>", "4", "correct"),
        ("Adding up, 12*3+6 = 42", "42", "correct"),
        ("Sunday", "\\text{Sunday}", "correct"),
        ("That makes 41.", "42", "wrong"),
    ],
)
def test_the_answer_is_the_last_box_outside_of_unclosed_thoughts_else_the_response(
    completion: str, gold: str, outcome: str
) -> None:
    assert grade(completion, gold).outcome == outcome


BEHIND_A_THOUGHT = [  # (completion, its answer; None: it has none)
    ("<think>so \\boxed{5}</think>The answer is 7.", "7"),
    ("so \\boxed{5}</think>The answer is $7$.", "7"),  # the prompt opened the thought
    ("<think>\\boxed{5}</think><answer>7</answer>", "7"),
    ("<THINK>\\boxed{5}</THINK>It is 7", "7"),
    ("<think>\\boxed{2}</think>\\boxed{7}", "7"),
    ("<think>\\boxed{5}</think>I do not know", None),
    ("<think>\\boxed{5}</think>Sorry, I don’t know.", None),
    ("<think>\\boxed{5}</think>I am not sure about this.", None),
    ("<think>\\boxed{5}</think>That was wrong.", None),
    ("<think>It is 5.</think>I cannot solve it.", None),
    ("<think>\\boxed{5}</think>", "5"),
    ("<think>\\boxed{5}</think>\nThat is the result.", "5"),
    ("The answer is \\boxed{5}</think>", "5"),
]


@pytest.mark.parametrize(("completion", "answer"), BEHIND_A_THOUGHT)
def test_the_text_behind_the_last_thought_is_preferred(completion: str, answer: str | None) -> None:
    assert extract_answer(completion) == answer
    outcomes = {gold: grade(completion, gold).outcome for gold in ("5", "7", "2, 7")}
    if answer is None:
        assert set(outcomes.values()) == {"no_answer"}
    else:
        assert [gold for gold in outcomes if outcomes[gold] == "correct"] == [answer]


def test_a_stated_option_behind_a_thought_replaces_the_box_in_it() -> None:
    completion = "<think>\\boxed{B}</think>The answer is (C)."
    assert [grade(completion, gold).outcome for gold in "BC"] == ["wrong", "correct"]


def test_the_text_behind_a_thought_in_tags_of_the_model_is_preferred_too() -> None:
    texts = ["[T]\\boxed{5}[/t]It is 7.", "[T]\\boxed{7}[/T]I do not know.", "[T]\\boxed{7}[/T]"]
    group = replace(completion_group(texts, "7"), thoughts=(Thought("[T]", "[/T]"),) * 3)
    pool = Mock(spec=GraderPool, grade=lambda pairs: [grade(*pair) for pair in pairs])
    verdicts = Verdicts(group, pool)
    assert [verdict.outcome for verdict in verdicts.grades] == ["correct", "no_answer", "correct"]


def test_every_kind_of_box_counts() -> None:
    assert boxes("\\boxed{a} \\fbox{b} \\boxed{\\frac{1}{2}} \\boxed 7 \\boxed{\\{1\\}}") == [
        "a", "b", "\\frac{1}{2}", "7", "\\{1\\}",
    ]  # fmt: skip
    assert boxes("\\boxed{\\boxed{5}}") == ["5"]
    assert boxes("\\boxed\\boxed{5} \\boxed \\fbox 6 \\boxed \\boxed") == ["5", "6"]
    assert boxes("\\boxed{\\frac{\\boxed{1}}{2}}") == ["\\frac{{1}}{2}"]
    assert grade("so \\fbox{42}", "42").outcome == "correct"


@pytest.mark.parametrize("completion", ["", "   ", "I do not know.", "\0", "\ud800", "🙂"])
def test_text_without_an_answer_is_no_answer(completion: str) -> None:
    assert grade(completion, "5") == Grade("no_answer", 0.0)


FOUND = [
    ("\\boxed{3}, no, \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"), ("The final answer is $8$.", "8"),
    ("<answer>12</answer>", "12"), ("<answer>a horse</answer>", "a horse"), ("I do not know.", None),
    ("\\boxed{never closed", None),
]  # fmt: skip


def test_the_answer_found_is_the_text_that_is_compared() -> None:
    completions, answers = zip(*FOUND, strict=True)
    assert [extract_answer(completion) for completion in completions] == list(answers)
    with GraderPool(1, timeout_s=HANG_S) as pool:
        assert pool.extract(completions) == list(answers)


# What a model with random weights wrote; the gold answer of the problem was 9.
BABBLE = " amatuerJson 9 \u0431\u0443\u0434\u0435 9"


@pytest.mark.parametrize(
    ("completion", "anything", "box_alone"),
    [
        ("so \\boxed{9}", "correct", "correct"), ("so \\fbox{8}", "wrong", "wrong"),
        ("<think>\\boxed{9}</think>", "correct", "correct"), ("<think>\\boxed{9}", "no_answer", "no_answer"),
        ("\\boxed{8}</think>The answer is 9.", "correct", "no_answer"),
        ("The final answer is $9$.", "correct", "no_answer"), ("<answer>9</answer>", "correct", "no_answer"),
        ("9", "correct", "no_answer"), (BABBLE, "correct", "no_answer"),
    ],
)  # fmt: skip
def test_where_a_box_is_required_nothing_else_is_an_answer(completion, anything, box_alone):
    assert grade(completion, "9").outcome == anything
    assert grade(completion, "9", require_box=True) == Grade.from_outcome(box_alone)
    assert (extract_answer(completion, require_box=True) is None) == (box_alone == "no_answer")


def test_a_pool_has_the_settings_of_the_rewards() -> None:
    rewards = RewardsConfig(accept_arithmetic=True, require_box=True, processes_per_worker=1, timeout_s=60)
    with GraderPool.from_config(rewards) as pool:
        outcomes = [grade.outcome for grade in pool.grade([("\\boxed{4+5}", "9"), (BABBLE, "9")])]
        assert outcomes == ["correct", "no_answer"] and pool.extract([BABBLE, "\\boxed{9}"]) == [None, "9"]


def test_unscorable_outcomes_are_nan() -> None:
    assert [Grade.from_outcome(o).reward for o in ("correct", "wrong", "no_answer")] == [1.0, 0.0, 0.0]
    assert all(math.isnan(Grade.from_outcome(o).reward) for o in ("timeout", "error"))


def test_a_gold_that_is_not_mathematics_is_matched_as_text() -> None:
    assert not gold_is_parsable("")
    assert all(gold_is_parsable(gold) for gold in ("5", "\\frac{1}{2}", "\\boxed{28\\%}", "(1,2)", "x^2+1"))
    assert grade(boxed("\\text{The  Moon.}"), "the moon").outcome == "correct"
    assert grade(boxed("5"), "").outcome == "wrong"
    assert grade(boxed(""), "").outcome == "wrong"


def test_normalising_keeps_differences_between_answers() -> None:
    assert normalise("\\left( \\dfrac{1}{2} , 3 \\right).") == normalise("(\\frac{1}{2},3)")
    assert normalise(".5") != normalise("5")
    assert normalise("1 2") != normalise("12")
    assert normalise("1,5") != normalise("15")


HOSTILE = [
    "__import__('os').system('touch {}')", "eval(\"open('{}','w')\")",
    "\\text{{__import__('os').system('touch {}')}}", "().__class__.__bases__[0].__subclasses__()",
    "lambda: 5", "1 if open('{}','w') else 2", "{" * 400, "}" * 400, "\\frac{" * 100, "$" * 300, "\\" * 301,
    "\\boxed{" * 200, "-" * 500, "\u202e5\u202c", "𝟝" * 300, "\x1b[31m5", "nan", "zoo", "1/0", "\\frac{0}{0}",
    "oo-oo",
]  # fmt: skip


# A single number is what math-verify's LaTeX grammar hands to sympy, and all that may get there.
NUMBER = re.compile(r"(?:Integer|Float|Rational)\s*\(\s*'?[-+.\d]*(?:e[-+]?\d+)?'?\s*\)\s*")


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect what sympy evaluates as Python during the test."""
    codes: list[str] = []
    original = sympy.parsing.sympy_parser.eval_expr

    def recorded(code: str, *rest: object) -> object:
        codes.append(code)
        return original(code, *rest)

    monkeypatch.setattr(sympy.parsing.sympy_parser, "eval_expr", recorded)
    return codes


@pytest.mark.parametrize("answer", HOSTILE)
def test_no_text_of_a_model_is_evaluated(answer: str, tmp_path, evaluated: list[str]) -> None:
    target = tmp_path / "executed"
    answer = answer.replace("{}", str(target))
    for completion in (boxed(answer), answer, f"The final answer is {answer}. I hope", f"${answer}$"):
        assert grade(completion, "-7").outcome in ("wrong", "no_answer")
    assert [code for code in evaluated if not NUMBER.fullmatch(code)] == []
    assert not target.exists()


@pytest.mark.parametrize("formula", ["12*3+6", "(1+2)*3", "3×4", "8÷2", "2**5", "1/2 + 1/3"])
def test_formulas_outside_latex_are_parsed_without_evaluation(formula: str, evaluated: list[str]) -> None:
    value = eval(formula.replace("×", "*").replace("÷", "/"))
    parsed = grader.read(f"The answer is: {formula}.")
    assert parsed is not None
    assert float(parsed.expression.doit()) == pytest.approx(value)
    assert [code for code in evaluated if not NUMBER.fullmatch(code)] == []


def test_long_text_is_graded_quickly() -> None:
    megabyte = "word {} $ \\frac " * 65_000
    assert grade(megabyte + boxed("5"), "5").outcome == "correct"
    assert grade(boxed("1" * 100_000), "5").outcome == "wrong"
    assert grade(boxed("1" * 1_000_000), "5").reward == 0.0
    assert grade("\\boxed{" * 150_000, "5").outcome == "no_answer"
    assert grade("\\boxed{" * 10_000 + "5" + "}" * 10_000, "5").outcome == "correct"
    assert grade("<answer>" * 100_000 + "5", "5").outcome in ("correct", "wrong", "no_answer")


def test_grading_works_outside_the_main_thread() -> None:
    outcomes: list[str] = []
    thread = threading.Thread(target=lambda: outcomes.append(grade(boxed("\\frac{2}{4}"), "0.5").outcome))
    thread.start()
    thread.join()
    assert outcomes == ["correct"]


@pytest.mark.slow
def test_known_cases_are_judged_better_than_by_math_verify(shared_data) -> None:
    every = read_cases(shared_data / "equivalence_cases.jsonl")
    # Half of the hard ones, for time; tests.evidence.grading takes all.
    cases = [c for c in every if c.subset == "plain"] + [c for c in every if c.subset == "hard"][::2]
    with GraderPool(2, timeout_s=HANG_S) as pool:
        judged = judge_with_ours(cases, pool, threads=2)
    plain = summary([j for j in judged if j.case.subset == "plain"])
    hard = summary([j for j in judged if j.case.subset == "hard"])
    assert plain["accuracy"] >= 0.969
    assert hard["accuracy"] >= 0.800
    assert plain["no verdict"] == hard["no verdict"] == 0
    # Matters of convention; math-verify accepts the first three too, and the last has one meaning.
    accepted = {(j.case.gold, j.case.completion) for j in judged if j.reward == 1.0 and not j.case.expected}
    assert accepted <= {
        ("$9$", "Answer $ \n 9 \n $"),
        ("1/3", boxed("0.3333333333").replace("So the", "The")),
        ("4", "<think>2 + 2 = 4</think>\nThe answer is 4."),
        ("$x \\in [-2,7]$", "$-2 \\\\le x \\\\le 7$"),
    }


def test_real_solutions_are_graded_as_labelled(shared_data, tmp_path) -> None:
    lines = (shared_data / "gsm8k_graded_solutions.jsonl").read_text(encoding="utf-8").splitlines()[::4]
    sample = tmp_path / "sample.jsonl"
    sample.write_text("\n".join(lines), encoding="utf-8")
    with GraderPool(2, timeout_s=HANG_S) as pool:
        total, differ = graded_solutions(sample, pool)
    assert total == len(lines)
    assert differ == []


def test_the_format_reward_wants_one_thought_then_one_answer() -> None:
    scores = {
        "<think>2+2</think>\\boxed{4}": 1.0, " <think>2+2</think>\nSo it is $\\boxed{4}$.\n": 1.0,
        "<think>2+2</think>\n<answer>4</answer>\n": 1.0, "": 0.0, "\\boxed{4}": 0.0,
        "<think>2+2 \\boxed{4}": 0.0, "2+2</think>\\boxed{4}": 0.0, "Well: <think>2+2</think>\\boxed{4}": 0.0,
        "<think>2+2</think><think>again</think>\\boxed{4}": 0.0, "<think>2+2</think>it is 4": 0.0,
        "<think>\\boxed{4}</think>": 0.0, "<think>2+2</think>\\boxed{}": 0.0,
        "<think>2+2</think><answer></answer>": 0.0,
        "<think>2+2</think><answer>4</answer><answer>5</answer>": 0.0, "<think>2+2</think><answer>4": 0.0,
    }  # fmt: skip
    assert {text: think_answer_format(text) for text in scores} == scores
