"""Which tags a model's thoughts have, and whether the prompt opens one, read from the prompt's text."""

from __future__ import annotations

import re
from typing import Any

from grpo_dist.types import Thought

# Opening tag -> closing tag, by what models of the field use; other tags are set in the configuration.
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
_END = 200  # characters at the end of a prompt in which its last tags are


def thought_of(prompt: str, template: str = "") -> Thought:
    """The thought that a completion of ``prompt`` goes on with.

    Its tags are those that ``prompt`` ends with, else the first that it or its chat ``template`` mentions,
    else ``<think>`` and ``</think>``.

        "...<|im_start|>assistant\\n<think>\\n"                    <think>, the prompt opens it
        "...<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n"       <think>, the prompt opens and closes it
        "...<|Assistant|></think>"                               <think>, the prompt closes it
        "Reason in <reasoning> tags. What is 2+2?"               <reasoning>, the prompt has none of it
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
    """Whether the text of a completion still has ``tag``, which is lost where it is a special token."""
    ids = tokenizer(tag, add_special_tokens=False)["input_ids"]
    return tag in tokenizer.decode(ids, skip_special_tokens=True)
