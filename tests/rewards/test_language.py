"""The share of words in a script, counted by hand."""

import pytest

from grpo_dist.rewards.language import _prose_and_formulas, script_share
from tests.support.patience import cpu_s


@pytest.mark.parametrize(
    ("text", "scripts", "expected"),
    [
        ("the answer ответ is $x$", {"latin"}, 0.75),
        ("the answer ответ is $x$", {"cyrillic"}, 0.25),
        ("the answer ответ is", {"latin", "cyrillic"}, 1.0),
        ("答案是 five", {"han"}, 0.75),  # three words of one letter each, and one Latin word
        ("ответ: x = 5, значит y = π", {"cyrillic"}, 1.0),  # single letters are variables
        ("Also gilt: so ist es", {"latin"}, 1.0),
        ("café naïve cafe\u0301", {"latin"}, 1.0),
        ("नमस्ते दुनिया", {"devanagari"}, 1.0),  # vowel signs are marks, not breaks
        ("これは答えです", {"hiragana", "han"}, 1.0),
        ("한국어 답", {"hangul"}, 1.0),
    ],
)
def test_share_of_words(text, scripts, expected):
    assert script_share(text, scripts) == pytest.approx(expected)


@pytest.mark.parametrize(
    "formula",
    [
        "$\\text{cm}$", "$x_{\\text{max}} = \\sin x$", "\\operatorname{lcm}(a, b)", "$$abc + def$$",
        "$\\triangle ABC \\sim \\triangle DEF$", "$AB \\parallel CD, EF$", "$x_{min} \\le max$", "\\(abc\\)",
        "\\[ abc\n= def \\]", "\\begin{align*} abc &= def \\end{align*}", "\\boxed{12}", "<think></think>",
        "https://example.org/abc", "$\\int xy\\,dx\\,dy$", "$ab$, $cd$", "$abc$",
    ],
)  # fmt: skip
def test_formulas_commands_tags_and_links_do_not_count(formula):
    assert script_share(f"это {formula} ответ", {"cyrillic"}) == 1.0
    assert script_share(f"это {formula} ответ", {"latin"}) == 0.0


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("a \\( b \\[ c \\] d", "a \\( b   d"),  # \\( is never closed
        ("\\begin{x} a \\end{y} b \\begin{y} c \\end{y}", "\\begin{x} a \\end{y} b  "),
        ("$$ a $ b $ c", "  a   c"),  # an empty formula, then a real one
        ("$$ a\n$b$ $$ c", "  c"),
    ],
)
def test_an_unclosed_formula_is_text(text, plain):
    assert _prose_and_formulas(text)[0] == plain


def test_a_lone_dollar_does_not_swallow_the_text():
    assert script_share("it costs $5\nи ещё два рубля", {"latin"}) == pytest.approx(2 / 6)


HIDDEN = [
    "$the answer is five$", "$$the answer is five$$", "\\(the answer is five\\)", "\\[the answer is five\\]",
    "\\begin{align*} the answer is five \\end{align*}", "$\\text{the answer is five}$",
    "$\\mathrm{the answer is five}$", "\\operatorname{the answer is five}", "\\label{the answer is five}",
    "<the answer is five>", "<the> <answer> <is> <five>", "\\the \\answer \\is \\five",
    "https://a.org/the-answer-is-five-because-two-and-three-make-five",
    "https://the.answer https://is.five https://the.answer https://is.five", "$the\\,ans\\;is\\ it$",
    "$the~ans\\!is\\quad it$", "$the$ $ans$ $is$ $it$", "\\(the\\) $ans$\n$$is$$ $it$",
]  # fmt: skip


@pytest.mark.parametrize("text", HIDDEN)
def test_words_count_wherever_they_hide(text):
    assert script_share(f"это {text} ответ", {"cyrillic"}) <= 0.5
    assert script_share(text, {"han"}) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "$答案是五$", "<答案是五>", "https://答案是五", "https://a.org/答案是五", "\\答案是五",
        "\\text{答案是五}", "$\\text{答案是五}$",
    ],
)  # fmt: skip
def test_letters_of_other_scripts_count_wherever_they_hide(text):
    # "https" is an additional word.
    assert script_share(f"the answer {text}", {"latin"}) <= 3 / 7 + 1e-6


UNCLOSED = ["\\(", "\\[", "\\begin{a}", "$\n", "$$ $"]
MARKUP = ["$\\text{", "$ab ", "ab   1 ", "\\label{a ", "https://a.", "<the ", "\\foo", "$\\begin{a}$"]


@pytest.mark.parametrize(
    ("piece", "size", "limit_s"),
    [
        *((piece, 60_000, 3.0) for piece in UNCLOSED),
        *((piece, 200_000, 10.0) for piece in MARKUP),
        pytest.param(f"${'a' * 20_000}$", 20_002, 1.0, id="a long word"),
    ],
)
def test_language_takes_time_linear_in_the_length(piece, size, limit_s):
    """Quadratic time would be seconds for a long completion."""
    with cpu_s(limit_s):
        script_share(piece * (size // len(piece)), {"latin"})


def test_a_text_without_words_scores_one():
    assert script_share("$2+2=4$ \\boxed{4}", {"han"}) == 1.0
    assert script_share("", {"latin"}) == 1.0


def test_words_in_separate_formulas_count():
    assert script_share("это $the$ $answer$ $is$ $five$ ответ", {"cyrillic"}) == pytest.approx(2 / 6)
    assert script_share("это $the$, $answer$, $is$, $five$ ответ", {"cyrillic"}) == 0.5  # the longer words
