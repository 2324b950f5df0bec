"""Length and repetition rewards. Lengths are tokens of the policy, never characters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def overlong_punishment(length: int, *, max_tokens: int, buffer_tokens: int) -> float:
    """Return 0 up to ``max_tokens - buffer_tokens``, then falling linearly to -1 at ``max_tokens``.

    Equation 13 of DAPO (Yu et al. 2025, arXiv:2503.14476): with L_max = ``max_tokens`` and L_cache =
    ``buffer_tokens``, (L_max - L_cache - length) / L_cache within the buffer, -1 beyond L_max.

        max_tokens 100, buffer_tokens 20:   80 -> 0   85 -> -0.25   90 -> -0.5   100 -> -1   120 -> -1
    """
    excess = length - (max_tokens - buffer_tokens)
    return -min(1.0, max(0.0, excess / buffer_tokens))


def cosine_length(
    correct: float,
    length: int,
    *,
    max_tokens: int,
    exceeded: bool,
    correct_range: tuple[float, float],
    wrong_range: tuple[float, float],
    exceed: float,
) -> float:
    """Return a reward that depends on correctness and length.

    Yeo et al. 2025, arXiv:2502.03373, section 4: r_L + (r_0 - r_L) (1 + cos(pi length / L_max)) / 2, and
    ``exceed`` for truncated completions. By default short correct answers are worth more than long ones, and
    long wrong answers more than short ones, so a model thinks longer where it does not know the answer.

        correct_range (1, 0.5), max_tokens 100:   0 -> 1   50 -> 0.75   100 -> 0.5

    Args:
        correct: 1 or 0; NaN gives NaN.
        exceeded: whether sampling was truncated at the limit.
        correct_range, wrong_range: (r_0 at length 0, r_L at ``max_tokens``) of correct and of wrong answers.
    """
    if math.isnan(correct):
        return math.nan
    if exceeded:
        return exceed
    first, last = correct_range if correct > 0.5 else wrong_range
    share = min(length / max_tokens, 1.0)
    return last + 0.5 * (first - last) * (1.0 + math.cos(math.pi * share))


def relative_length(correct: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """Score length relative to the group: 0.5 for the shortest to -0.5 for the longest.

    Kimi k1.5 (arXiv:2501.12599), section 2.3.3: lambda = 0.5 - (length - shortest) / (longest - shortest);
    lambda for a correct answer, min(0, lambda) for a wrong one; 0 for all if all are equally long. A sample
    whose ``correct`` is NaN gets NaN, but its length still counts.

        correct [1, 1, 0, 0], lengths [10, 30, 20, 10] -> [0.5, -0.5, 0, 0]
    """
    shortest, longest = min(lengths, default=0), max(lengths, default=0)
    if shortest == longest:
        return [math.nan if math.isnan(c) else 0.0 for c in correct]
    rewards = []
    for right, length in zip(correct, lengths, strict=True):
        value = 0.5 - (length - shortest) / (longest - shortest)
        rewards.append(math.nan if math.isnan(right) else value if right > 0.5 else min(0.0, value))
    return rewards


def repeated_share(token_ids: Sequence[int] | np.ndarray, *, n: int) -> float:
    """Return the share of token n-grams that repeat an earlier one: 1 - distinct / all, in [0, 1).

    The repetition penalty of Yeo et al. 2025 (arXiv:2502.03373, section 4.3 and its appendix) over whole
    completions. 0 for fewer than ``n`` tokens.

        [1, 2, 1, 2, 1], n = 2:   12 21 12 21 -> 1 - 2/4 = 0.5
    """
    ids = np.asarray(token_ids, dtype=np.int32)
    total = len(ids) - n + 1
    if total <= 0:
        return 0.0
    raw, width = ids.tobytes(), ids.itemsize
    distinct = {raw[width * i : width * (i + n)] for i in range(total)}
    return 1.0 - len(distinct) / total
