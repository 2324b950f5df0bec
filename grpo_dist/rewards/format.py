"""Does a completion keep the think/answer format?"""

from __future__ import annotations

import re

from grpo_dist.rewards.text import boxes

_FORM = re.compile(r"\s*<think>(?P<thought>.*?)</think>(?P<rest>.*)", re.DOTALL)
_ANSWER = re.compile(r"\s*<answer>.*?\S.*?</answer>\s*", re.DOTALL)


def think_answer_format(completion: str) -> float:
    """1.0 for ``<think> ... </think>`` exactly once, at the start, and then an answer: one non-empty
    ``<answer>...</answer>`` and nothing else, or text with a non-empty ``\\boxed{...}``. 0.0 otherwise.

        <think>2+2</think>\\boxed{4}              1.0
        <think>2+2</think><answer>4</answer>      1.0
        \\boxed{4}                                0.0    no thought
        <think>2+2 \\boxed{4}                     0.0    never closed
    """
    match = _FORM.fullmatch(completion)
    if match is None or any(tag in match["thought"] + match["rest"] for tag in ("<think>", "</think>")):
        return 0.0
    rest = match["rest"]
    tags = rest.count("<answer>") + rest.count("</answer>")
    if tags:
        return 1.0 if tags == 2 and _ANSWER.fullmatch(rest) else 0.0
    return 1.0 if any(boxes(rest)) else 0.0
