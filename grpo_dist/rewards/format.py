"""Does a completion keep the think/answer format?"""

from __future__ import annotations

from grpo_dist.rewards.text import boxes

_NOTHING = "{} \t\r\n"


def think_answer_format(completion: str) -> float:
    """1.0 for ``<think> ... </think>`` exactly once, at the start, and then an answer: one non-empty
    ``<answer>...</answer>`` and nothing else, or text with a non-empty ``\\boxed{...}``. 0.0 otherwise.

        <think>2+2</think>\\boxed{4}              1.0
        <think>2+2</think><answer>4</answer>      1.0
        \\boxed{4}                                0.0    no thought
        <think>2+2 \\boxed{4}                     0.0    never closed
        <think>2+2</think>\\boxed{{}}             0.0    nothing in it
    """
    before, _, opened = completion.partition("<think>")
    thought, closed, rest = opened.partition("</think>")
    if before.strip() or not closed or any(tag in thought + rest for tag in ("<think>", "</think>")):
        return 0.0
    tags = rest.count("<answer>") + rest.count("</answer>")
    if tags:
        before, _, opened = rest.partition("<answer>")
        answer, closed, after = opened.partition("</answer>")
        alone = tags == 2 and closed and not before.strip() and not after.strip()
        return 1.0 if alone and answer.strip() else 0.0
    return 1.0 if any(box.strip(_NOTHING) for box in boxes(rest)) else 0.0
