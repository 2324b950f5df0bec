"""Detects the tags of a model's thoughts, and whether the prompt opens one, from the prompt's text."""

from __future__ import annotations

import re
from typing import Any

from grpo_dist.types import Thought

# Opening tag -> closing tag of well-known models; other tags are set in the configuration.
_KNOWN = {
    "<think>": "</think>",
    "<THINK>": "</THINK>",
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<reasoning>": "</reasoning>",
    "<seed:think>": "</seed:think>",
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "[THINK]": "[/THINK]",
}
_TAGS = "|".join(map(re.escape, _KNOWN))
_MENTIONED = re.compile(_TAGS)
_OPENED = re.compile(rf"({_TAGS})\s*$")
_CLOSED = re.compile(
    "|".join(rf"(?:{re.escape(opening)}\s*)?{re.escape(closing)}\s*$" for opening, closing in _KNOWN.items())
)
_OPENING = {closing: opening for opening, closing in _KNOWN.items()}
_END = 200  # last characters of a prompt that are searched for tags


def thought_of(prompt: str, template: str = "") -> Thought:
    """Return the thought that a completion of ``prompt`` begins or continues.

    Its tags are those at the end of ``prompt``, else the first that it or its chat ``template`` mentions,
    else ``<think>`` and ``</think>``.

        "...<|im_start|>assistant\\n<think>\\n"                    <think>, the prompt opens it
        "...<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n"       <think>, the prompt opens and closes it
        "...<|Assistant|></think>"                               <think>, the prompt closes it
        "Reason in <reasoning> tags. What is 2+2?"               <reasoning>, the completion opens it
    """
    end = prompt[-_END:]
    if opened := _OPENED.search(end):
        return Thought(opened[1], _KNOWN[opened[1]], "opens")
    if closed := _CLOSED.search(end):
        opening = next(tag for closing, tag in _OPENING.items() if closed.group().rstrip().endswith(closing))
        return Thought(opening, _KNOWN[opening], "closes")
    mentioned = _MENTIONED.search(prompt) or _MENTIONED.search(template)
    opening = mentioned.group() if mentioned else "<think>"
    return Thought(opening, _KNOWN[opening])


def is_kept(tag: str, tokenizer: Any) -> bool:
    """Return whether ``tag`` survives decoding; as a special token it is dropped."""
    ids = tokenizer(tag, add_special_tokens=False)["input_ids"]
    return tag in tokenizer.decode(ids, skip_special_tokens=True)
