"""Rows of data sources become tokenised prompts."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from jinja2 import TemplateError

from grpo_dist.config import DataConfig
from grpo_dist.data.readers import DataRow
from grpo_dist.data.tasks import SourceTasks
from grpo_dist.data.thoughts import is_kept, thought_of
from grpo_dist.environments.base import Message
from grpo_dist.types import Prompt, Task, Thought

_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
# What makes two problems different: numbers, factorials and primes, and all but white space and punctuation.
_PARTS = re.compile(
    r"""
    (?:(?<![^\s(\[{$=+*/^-])\.)?\d+(?:\.\d+)*!*        # 15, 1.5, .5, 5!
    | (?<![^\W\d_])[^\W\d_](?:!+|'+(?![^\W\d_]))      # n!, f', but not the end of a word: "it's", "Look!"
    | [)\]}][!']+
    | [^\s.,;:!?"'`$]
    """,
    re.VERBOSE,
)


KEYS_OF_DATA = "data.system_prompt and data.template_kwargs"


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """How a problem becomes the text of a prompt.

    Attributes:
        instruction: text on a line of its own after the problem.
        use_chat_template: False for the plain text.
        template_kwargs: further arguments of the chat template.
        keys: what to check where the template fails, for messages.
    """

    system_prompt: str | None = None
    instruction: str | None = None
    use_chat_template: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    keys: str = KEYS_OF_DATA

    @classmethod
    def of(cls, data: DataConfig) -> PromptFormat:
        """Read the format from section `data` of the configuration."""
        return cls(data.system_prompt, data.instruction, data.chat_template == "model", data.template_kwargs)

    def asked(self, problem: str, messages: Sequence[Message] = ()) -> str | Sequence[Message]:
        """Return what a prompt asks: ``problem``, or the row's ``messages`` with ``problem`` and the
        instruction as the last user message.
        """
        if not messages:
            return problem
        last = max(i for i, message in enumerate(messages) if message["role"] == "user")
        question = {**messages[last], "content": user_content(problem, self.instruction)}
        return [*messages[:last], question, *messages[last + 1 :]]

    def text(self, asked: str | Sequence[Message], tokenizer: Any) -> str:
        """Render the prompt that asks ``asked``, up to where the model's answer begins."""
        messages = self.messages(asked)
        if not self.use_chat_template:
            return plain_text(messages)
        return render_messages(messages, tokenizer, self.template_kwargs, keys=self.keys)

    def messages(self, asked: str | Sequence[Message]) -> list[Message]:
        """Return the messages of a prompt: ``asked`` is the problem, or messages that get no instruction. A
        system prompt among them takes the place of the configured one.
        """
        if isinstance(asked, str):
            asked = [{"role": "user", "content": user_content(asked, self.instruction)}]
        if self.system_prompt and all(message["role"] != "system" for message in asked):
            return [{"role": "system", "content": self.system_prompt}, *asked]
        return list(asked)

    def token_ids(self, asked: str | Sequence[Message], tokenizer: Any) -> list[int]:
        """Tokenise the prompt that asks ``asked``, up to where the model's answer begins."""
        return _ids(self.text(asked, tokenizer), tokenizer, self.use_chat_template)


@dataclass(frozen=True, slots=True)
class Dropped:
    """A row that became no prompt, and why."""

    location: str
    reason: str


@dataclass(frozen=True, slots=True)
class BuiltPrompts:
    """Prompts in row order, the rows dropped, and how often each uid has been given so far."""

    prompts: list[Prompt]
    dropped: list[Dropped]
    uid_counts: Mapping[str, int]


def build_prompts(
    rows: Sequence[DataRow],
    tokenizer: Any,
    prompt_format: PromptFormat = PromptFormat(),
    *,
    max_prompt_tokens: int,
    overlong: Literal["refuse", "drop"] = "refuse",
    uid_counts: Mapping[str, int] | None = None,
    tasks: SourceTasks | None = None,
) -> BuiltPrompts:
    """Tokenise ``rows`` into prompts with distinct uids.

    Args:
        overlong: whether a prompt of more than ``max_prompt_tokens`` tokens is an error or is dropped.
        uid_counts: those of the previous call, where the prompts of several calls must differ in uid.
        tasks: of the rows' environment; None: they have none.

    Raises:
        ValueError: the tokenizer lacks the chat template or the template rejects the messages; a prompt has
            no tokens; a prompt is overlong with ``overlong="refuse"``; or every prompt is dropped.
    """
    if prompt_format.use_chat_template and not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "data.chat_template = model, but the model's tokenizer has no chat template; use an "
            "instruction-tuned model or set data.chat_template=none"
        )
    prompts: list[Prompt] = []
    dropped: list[Dropped] = []
    counts = Counter(uid_counts or {})
    thoughts = _Thoughts(tokenizer, prompt_format.use_chat_template)
    for index, row in enumerate(rows):
        task, text = _task_and_text(row, index, prompt_format, tokenizer, tasks)
        token_ids = _ids(text, tokenizer, prompt_format.use_chat_template)
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
        uid = _uid(row)
        counts[uid] += 1
        # A row that occurs again gets a number as suffix.
        unique = uid if counts[uid] == 1 else f"{uid}-{counts[uid]}"
        ids, columns = np.asarray(token_ids, np.int32), dict(row.columns)
        thought = thoughts.of(text)
        prompt = Prompt(unique, ids, row.answer, row.source, row.problem, columns, thought, task)
        prompts.append(replace(prompt, messages=row.messages) if row.messages else prompt)
    if dropped and not prompts:
        raise ValueError(
            f"{dropped[0].reason}, and so has every one of the {len(dropped)} prompts; raise the limit"
        )
    return BuiltPrompts(prompts, dropped, counts)


def plain_text(messages: Sequence[Message]) -> str:
    """Return the text of ``messages`` where there is no chat template."""
    return "\n".join(str(message["content"]) for message in messages)


def _task_and_text(
    row: DataRow, index: int, prompt_format: PromptFormat, tokenizer: Any, tasks: SourceTasks | None
) -> tuple[Task | None, str]:
    asked = prompt_format.asked(row.problem, row.messages)
    if tasks is None:
        return None, prompt_format.text(asked, tokenizer)
    messages = prompt_format.messages(tasks.questions[index] if tasks.questions else asked)
    if not prompt_format.use_chat_template:
        return tasks.task, plain_text(messages)
    task = tasks.task_of(messages)
    try:
        return task, tasks.renderer.prompt(task)
    except (TemplateError, TypeError) as error:
        raise ValueError(
            f"{row.location}: the model's chat template rejects the messages that environment "
            f"{task.environment} asks with ({error}); change what `start` returns, or data.template_kwargs"
        ) from error


def _ids(text: str, tokenizer: Any, use_chat_template: bool) -> list[int]:
    """Tokenise ``text``; a rendered chat template already contains the special tokens."""
    if use_chat_template:
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokenizer(text)["input_ids"]


class _Thoughts:
    """Detects the thought that each prompt of one tokenizer begins."""

    def __init__(self, tokenizer: Any, use_chat_template: bool) -> None:
        template = getattr(tokenizer, "chat_template", None) if use_chat_template else None
        self._tokenizer, self._template = tokenizer, template if isinstance(template, str) else ""
        self._kept: dict[str, bool] = {}

    def of(self, text: str) -> Thought:
        """Return the thought of a completion of ``text``.

        When decoding drops the closing tag, the end of a thought is invisible, so the prompt counts as
        opening none.
        """
        thought = thought_of(text, self._template)
        if not thought.prompt:
            return thought
        if thought.closing not in self._kept:
            self._kept[thought.closing] = is_kept(thought.closing, self._tokenizer)
        return thought if self._kept[thought.closing] else Thought(thought.opening, thought.closing)


def user_content(problem: str, instruction: str | None) -> str:
    """Return the user message: the problem, and the instruction on a line of its own."""
    return f"{problem}\n{instruction}" if instruction else problem


def tokenise_messages(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    template_kwargs: Mapping[str, Any],
    *,
    keys: str = KEYS_OF_DATA,
) -> list[int]:
    """Tokenise a conversation, up to where the model's answer begins."""
    return _ids(render_messages(messages, tokenizer, template_kwargs, keys=keys), tokenizer, True)


def render_messages(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    template_kwargs: Mapping[str, Any],
    *,
    open_turn: bool = True,
    keys: str = KEYS_OF_DATA,
) -> str:
    """Render a conversation; with ``open_turn`` up to where the model's answer begins.

    Raises ValueError for messages or arguments that the chat template rejects; it names ``keys``.
    """
    try:
        return tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=open_turn, **template_kwargs
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise ValueError(
            f"the model's chat template rejects the {' and '.join(m['role'] for m in messages)} messages "
            f"({error}); check {keys}"
        ) from error


def check_overlap(train: Sequence[Prompt], held_out: Sequence[Prompt]) -> str:
    """Report how many held-out problems are also in ``train``; "" for none. Ignores case and punctuation."""
    trained = {reading for p in train for reading in _plain(p.text)}
    shared = [p for p in held_out if not trained.isdisjoint(_plain(p.text))]
    if not shared:
        return ""
    count = f"{len(shared)} of {len(held_out)}"
    return f"{count} problems are also in the training set, e.g. {shared[0].text[:80]!r}"


def _uid(row: DataRow) -> str:
    """Return an identifier that is stable across runs and row order."""
    asked = json.dumps(row.messages, sort_keys=True) if row.messages else row.problem
    digest = hashlib.blake2b(f"{asked}\x1f{row.answer}".encode(), digest_size=8).hexdigest()
    return f"{row.source}-{digest}"


def _plain(text: str) -> set[str]:
    """Reduce a problem to numbers, letters and operators in lower case, for comparison: with commas of
    thousands, and as a list of numbers, where it may be either.

    "5! + f'(2)" -> "5! + f' ( 2 )";  "{100,200}" -> "{ 100200 }" and "{ 100 200 }"
    """
    lower = text.casefold()
    return {" ".join(_PARTS.findall(reading)) for reading in (_THOUSANDS.sub("", lower), lower)}
