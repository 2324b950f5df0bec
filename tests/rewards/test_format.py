"""The think/answer format: run time and confusing inputs. `test_math_grading.py` has what it accepts."""

import pytest

from grpo_dist.rewards.format import think_answer_format
from grpo_dist.types import Thought
from tests.support.made_completions import HOSTILE
from tests.support.patience import cpu_s

WORDS, N = "x" * 60_000, 20_000
LINEAR_S = 10.0  # each takes less than a second; quadratic time would be minutes
CONFUSING_TAGS = [
    "<think>" * N, "</think>" * N, "<think></think>" * N + "\\boxed{5}",
    "<think></think>" + "<answer>" * N, "<think></think>" + "<answer>5</answer>" * N,
    "<think></think>" + "</answer>5<answer>" * N, "<think></think>" + "<answer" * N,
    "<answer><think></think>5</answer>", "<think><answer></think>5</answer>",
]  # fmt: skip


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        *((text, 0.0) for text in CONFUSING_TAGS),
        (f"<think>t</think><answer>{WORDS}</answer>", 1.0),
        (f"<think>{WORDS}</think><answer>5</answer>", 1.0),
        (f"<think></think><answer>{WORDS}</answer>", 0.0),
        (f"<think>t</think><answer>{WORDS}</answer> and more", 0.0),
        (f"<think>t</think><answer>{' ' * 60_000}</answer>", 0.0),
        (f"<think>t</think>{WORDS}<answer></answer>", 0.0),
    ],
)
def test_format_takes_time_linear_in_the_length(completion, score):
    with cpu_s(LINEAR_S):
        assert think_answer_format(completion) == score


BOXES = {
    "never closed": ("\\boxed{" * N, 0.0), "one in another": ("\\boxed{" * N + "5" + "}" * N, 1.0),
    "one in another around nothing": ("\\boxed{" * N + "}" * N, 0.0),
    "half of them closed": ("\\boxed{{" * N + "}" * N, 0.0), "empty": ("\\boxed{}" * N, 0.0),
    "empty, but for one": ("\\fbox{ }" * N + "\\boxed{0}", 1.0),
    "empty in one": ("\\boxed{" + "\\boxed{}" * N + "}", 0.0),
    "braces in one": ("\\boxed{" + "{" * N + "}" * N + "}", 0.0),
    "braces between them": ("\\boxed{}{" * N, 0.0), "the empty set": ("\\boxed{\\{\\}}", 1.0),
    "an escaped brace closes none": ("\\boxed{" + "\\}" * N, 0.0),
    "without braces, around nothing": ("\\boxed" * N, 0.0),
    "without braces, around space": ("\\boxed" + " " * N, 0.0),
    "without braces, spaces between them": (("\\boxed" + " " * 50) * N, 0.0),
    "without braces, around a sign": ("\\boxed," * N, 0.0), "backslashes": ("\\" * N, 0.0),
}  # fmt: skip


@pytest.mark.parametrize("name", BOXES)
def test_confusing_boxes_after_a_thought(name):
    text, score = BOXES[name]
    with cpu_s(LINEAR_S):
        assert think_answer_format(f"<think>t</think>{text}") == score


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_no_hostile_answer_after_a_thought_delays_the_format(name):
    with cpu_s(LINEAR_S):
        assert think_answer_format(f"<think>t</think>{HOSTILE[name]}") in (0.0, 1.0)
        has_tags = "<think>" in HOSTILE[name]
        assert think_answer_format(f"<think>t</think><answer>{HOSTILE[name]}</answer>") == float(not has_tags)


NOTHING = [
    "", " \n\t", "\u200b", "\u200b\u2060\ufeff", "\u3164", "\u2800", "\ufe0f", "\\,", "\\quad", "\\ ", "~",
    "$$", "{}", "\\text{}", "\\text{ }", "\\mathrm{\\,}", "\\hspace{1em}", "\\phantom{5}", "\\text{\u200b}",
    "\\mbox{}\\;", "\\textbf{{}}", "\\enskip", "\\space", "\\\\", "\\newline", "\\par", "\\emph{}",
    "\\underline{ }", "\\sqrt{}", "\\phantom{{5}}", "\\phantom{\\text{5}}", "\\phantom 5", "\\rule{1em}{1em}",
    "&nbsp;", "&#160;", "<br>", "<br/><b></b>",
]  # fmt: skip


@pytest.mark.parametrize("nothing", NOTHING)
def test_invisible_text_is_neither_a_thought_nor_an_answer(nothing):
    assert think_answer_format(f"<think>{nothing}</think>\\boxed{{5}}") == 0.0
    assert think_answer_format(f"<think>t</think>\\boxed{{{nothing}}}") == 0.0
    assert think_answer_format(f"<think>t</think><answer>{nothing}</answer>") == 0.0
    assert think_answer_format(f"<think>t</think><answer>\\boxed{{{nothing}}}</answer>") == 0.0


@pytest.mark.parametrize(
    "something",
    [
        "\\sqrt{2}", "\\underline{5}", "\\phantom{{5}}5", "a < b", "<b>5</b>", "\\\\5", "\\rule{1em}{1em}1",
        "0", "x", "\\emptyset", "\\{\\}", "\\infty", "\\text{no}", "答", "\\pi", "\\%",
    ],
)  # fmt: skip
def test_visible_text_is_an_answer(something):
    assert think_answer_format(f"<think>t</think>\\boxed{{{something}}}") == 1.0


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("2+2</think>\\boxed{4}", 1.0),
        ("2+2</think><answer>4</answer>", 1.0),
        ("<think>2+2</think>\\boxed{4}", 0.0),  # opened twice
        ("2+2 \\boxed{4}", 0.0),
        ("</think>\\boxed{4}", 0.0),
        ("2+2</think></think>\\boxed{4}", 0.0),
    ],
)
def test_a_thought_opened_by_the_prompt_only_needs_closing(completion, score):
    assert think_answer_format(completion, thought=Thought(prompt="opens")) == score


def test_tags_are_settings_and_after_an_empty_thought_only_an_answer_is_expected():
    custom = Thought("<THINK>", "</THINK>")
    assert think_answer_format("<THINK>a</THINK>[4]", thought=custom, answer_tags=("[", "]")) == 1.0
    assert think_answer_format("<think>a</think>\\boxed{4}", thought=custom) == 0.0
    assert think_answer_format("a</THINK>\\boxed{4}", thought=Thought("<THINK>", "</THINK>", "opens")) == 1.0
    closed = Thought(prompt="closes")
    assert think_answer_format("so \\boxed{4}", thought=closed) == 1.0
    assert think_answer_format("<think>a</think>\\boxed{4}", thought=closed) == 0.0
