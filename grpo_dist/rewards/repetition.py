"""Measures repetition within a completion."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


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
