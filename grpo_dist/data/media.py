"""Placeholders of images, videos and sound in problems, which nothing here reads."""

from __future__ import annotations

import re
from collections.abc import Sequence

from grpo_dist.data.readers import DataRow

# As data sets write them (LLaVA, MMMU, Geometry3K), and as the chat templates of Qwen, Gemma, Llama and
# Pixtral do.
_PLACEHOLDER = re.compile(
    r"<(?:image|video|audio)(?:_?\d+)?>|<\|(?:image|video|audio)(?:_pad)?\|>|<\|vision_start\|>"
    r"|<start_of_image>|<image_soft_token>|\[IMG\]"
)


def media_problem(rows: Sequence[DataRow]) -> str:
    """Return how many ``rows`` refer to an image, video or sound, and the first of them; "": none does."""
    found = [(row, match[0]) for row in rows if (match := _PLACEHOLDER.search(row.problem))]
    if not found:
        return ""
    row, placeholder = found[0]
    return (
        f"{len(found)} of {len(rows)} problems have a placeholder for an image, video or sound (the first is "
        f"{row.location}, {placeholder}), and the model reads text alone; remove such rows"
    )
