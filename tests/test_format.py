"""The think/answer format: its time. What it accepts is beside the grader's cases."""

import time

import pytest

from grpo_dist.rewards.format import think_answer_format

WORDS = "x" * 60_000


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        (f"<think></think><answer>{WORDS}</answer>", 1.0),
        (f"<think></think><answer>{WORDS}</answer> and more", 0.0),
        (f"<think></think><answer>{' ' * 60_000}</answer>", 0.0),
        (f"<think></think>{WORDS}<answer></answer>", 0.0),
    ],
)
def test_the_time_a_completion_takes_is_linear_in_its_length(completion, score):
    begin = time.monotonic()
    assert think_answer_format(completion) == score
    assert time.monotonic() - begin < 1.0
