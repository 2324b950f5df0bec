"""From rows to tokenised prompts."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jinja2 import TemplateError

from grpo_dist.data.readers import Row
from grpo_dist.data.thoughts import is_kept, thought_of
from grpo_dist.types import Prompt, Thought


@dataclass(frozen=True, slots=True)
class Dropped:
    location: str
    reason: str


def build_prompts(
    rows: Sequence[Row],
    tokenizer: Any,
    *,
    system_prompt: str | None = None,
    instruction: str | None = None,
    use_chat_template: bool = True,
    template_kwargs: Mapping[str, Any] | None = None,
    max_prompt_tokens: int,
    overlong: Literal["refuse", "drop"] = "refuse",
    seen: dict[str, int] | None = None,
) -> tuple[list[Prompt], list[Dropped]]:
    """Prompts in row order, and what was dropped and why.

    ``seen`` counts the uids given so far; hand the same dict to every call whose prompts must differ in uid.

    Raises ValueError for a tokenizer without a chat template where one is asked for, for a template that does
    not take the messages, for a prompt without tokens, with ``overlong="refuse"`` for the first prompt of
    more than ``max_prompt_tokens`` tokens, and where every prompt is dropped.
    """
    if use_chat_template and not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "data.chat_template = model, but the model's tokenizer has no chat template; use an "
            "instruction-tuned model or "
            "set data.chat_template=none"
        )
    prompts: list[Prompt] = []
    dropped: list[Dropped] = []
    seen = {} if seen is None else seen
    thoughts = _Thoughts(tokenizer, use_chat_template)
    for row in rows:
        text = prompt_text(
            row.problem, tokenizer, system_prompt, instruction, use_chat_template, dict(template_kwargs or {})
        )
        token_ids = _ids(text, tokenizer, use_chat_template)
        if not len(token_ids):
            raise ValueError(
                f"{row.location}: the prompt {row.problem[:80]!r} has no tokens, expected at least one; "
                "check the model's tokenizer and chat template (`data.chat_template`), or remove the row"
            )
        if len(token_ids) > max_prompt_tokens:
            reason = (
                f"{row.location}: the prompt has {len(token_ids)} tokens, data.max_prompt_tokens = "
                f"{max_prompt_tokens}"
            )
            if overlong == "refuse":
                raise ValueError(f"{reason}; raise the limit, remove the row, or set data.overlong=drop")
            dropped.append(Dropped(row.location, reason))
            continue
        uid = _uid(row, seen)
        columns = dict(row.columns)
        ids = np.asarray(token_ids, np.int32)
        thought = thoughts.of(text)
        prompts.append(Prompt(uid, ids, row.answer, row.source, row.problem, columns, thought))
    if dropped and not prompts:
        raise ValueError(
            f"{dropped[0].reason}, and so has every one of the {len(dropped)} prompts; raise the limit"
        )
    return prompts, dropped


def tokenise(
    problem: str,
    tokenizer: Any,
    system_prompt: str | None,
    instruction: str | None,
    use_chat_template: bool,
    template_kwargs: dict[str, Any],
) -> list[int]:
    """Token ids of the prompt, up to where the model's answer begins."""
    text = prompt_text(problem, tokenizer, system_prompt, instruction, use_chat_template, template_kwargs)
    return _ids(text, tokenizer, use_chat_template)


def prompt_text(
    problem: str,
    tokenizer: Any,
    system_prompt: str | None,
    instruction: str | None,
    use_chat_template: bool,
    template_kwargs: dict[str, Any],
) -> str:
    """The prompt, up to where the model's answer begins."""
    content = user_content(problem, instruction)
    if not use_chat_template:
        return f"{system_prompt}\n{content}" if system_prompt else content
    messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
    messages.append({"role": "user", "content": content})
    return _rendered(messages, tokenizer, template_kwargs)


def _ids(text: str, tokenizer: Any, use_chat_template: bool) -> list[int]:
    """A chat template has the special tokens in its text."""
    if use_chat_template:
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokenizer(text)["input_ids"]


class _Thoughts:
    """The thoughts that prompts of one tokenizer show."""

    def __init__(self, tokenizer: Any, use_chat_template: bool) -> None:
        template = getattr(tokenizer, "chat_template", None) if use_chat_template else None
        self._tokenizer, self._template = tokenizer, template if isinstance(template, str) else ""
        self._kept: dict[str, bool] = {}

    def of(self, text: str) -> Thought:
        """Without a tag at the prompt's end where completions would lose the closing one: then nobody sees
        where a thought ends.
        """
        thought = thought_of(text, self._template)
        if not thought.prompt:
            return thought
        if thought.closing not in self._kept:
            self._kept[thought.closing] = is_kept(thought.closing, self._tokenizer)
        return thought if self._kept[thought.closing] else Thought(thought.opening, thought.closing)


def user_content(problem: str, instruction: str | None) -> str:
    """What the user says: the problem, and the instruction on a line of its own."""
    return f"{problem}\n{instruction}" if instruction else problem


def tokenise_messages(
    messages: Sequence[Mapping[str, str]], tokenizer: Any, template_kwargs: Mapping[str, Any]
) -> list[int]:
    """Token ids of the conversation, up to where the model's answer begins."""
    return _ids(_rendered(messages, tokenizer, template_kwargs), tokenizer, True)


def _rendered(
    messages: Sequence[Mapping[str, str]], tokenizer: Any, template_kwargs: Mapping[str, Any]
) -> str:
    try:
        return tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True, **template_kwargs
        )
    except TemplateError as error:
        raise ValueError(
            f"the model's chat template refuses the {' and '.join(m['role'] for m in messages)} messages "
            f"({error}); check data.system_prompt and data.template_kwargs"
        ) from error


def check_overlap(train: Sequence[Prompt], held_out: Sequence[Prompt]) -> str:
    """A sentence that says how many held-out problems are also trained on, "" for none. Case and punctuation
    do not count.
    """
    trained = {_plain(p.text) for p in train}
    shared = [p for p in held_out if _plain(p.text) in trained]
    if not shared:
        return ""
    count = f"{len(shared)} of {len(held_out)}"
    return f"{count} problems are also in the training set, e.g. {shared[0].text[:80]!r}"


def _uid(row: Row, seen: dict[str, int]) -> str:
    """Stable across runs and row order; a row that comes again gets a number behind."""
    digest = hashlib.blake2b(f"{row.problem}\x1f{row.answer}".encode(), digest_size=8).hexdigest()
    uid = f"{row.source}-{digest}"
    seen[uid] = seen.get(uid, 0) + 1
    return uid if seen[uid] == 1 else f"{uid}-{seen[uid]}"


def _plain(text: str) -> str:
    """Letters, digits and operators, lower case: what makes a problem the same problem."""
    return re.sub(r"[\s.,;:!?\"'`$]+", "", text.casefold())
