"""Degenerate completions are detected; valid text that looks similar is not."""

import json
import random

import pytest

from grpo_dist.rewards.format import is_degenerate
from tests.support.patience import cpu_s

PROSE = (
    "Natalia sold 48 / 2 = 24 clips in May, and so 48 + 24 = 72 altogether. To see that this is right, note "
    "that half of 48 is 24 and that nothing else was sold. "
)


@pytest.mark.parametrize(
    "text",
    [
        "1" * 300, "the answer is 42. " * 20, PROSE + "Wait, let me check again.\n" * 100, "\\frac{1}{" * 50,
        "\ufffd\ufffd x = 3 \ufffd", "\x00\x01\x02abc", PROSE + "\ud83d" * 40, "\ue000" * 9,
    ],
)  # fmt: skip
def test_loops_and_unreadable_text_are_degenerate(text):
    assert is_degenerate(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1, 1, 1, 1, 1, 1",
        PROSE * 3,
        ", ".join(map(str, range(300))),
        "\n".join(f"| {n} | {n * n} |" for n in range(100)),
        "答案是 42，因为 6 × 7 = 42。" * 2,
        "∀x∈ℝ: x² ≥ 0 ⇒ √(x²) = |x| 🎉\t\n",
        PROSE + "\ufffd",
        "".join(random.Random(0).choices("0123456789+-*/=\n ", k=3000)),
    ],
)
def test_text_that_only_looks_degenerate_is_not_counted(text):
    assert not is_degenerate(text)


def test_the_time_does_not_grow_with_the_number_of_distinct_characters():
    kinds = [chr(0xF0000 + i) for i in range(60_000)]  # private use
    with cpu_s(20.0):  # counting each character separately takes a minute
        assert is_degenerate("".join(kinds) * 10)
        assert not is_degenerate("".join(kinds) + "".join(random.Random(0).choices("0123456789", k=600_000)))


def test_one_character_in_ten_may_be_unreadable():
    readable = "".join(random.Random(0).choices("abcdefghij ", k=90))
    assert not is_degenerate(readable + "\ufffd" * 4 + "\x00" * 6)
    assert is_degenerate(readable + "\ufffd" * 5 + "\x00" * 6)


def test_few_real_solutions_are_degenerate(shared_data):
    """The degenerate one ends in two thousand threes."""
    lines = (shared_data / "gsm8k_graded_solutions.jsonl").read_text().splitlines()
    texts = [v for line in lines for v in json.loads(line).values() if isinstance(v, str)]
    degenerate = [text for text in texts if is_degenerate(text)]
    assert len(texts) > 1000 and len(degenerate) == 1 and degenerate[0].rstrip().endswith("3" * 200)
