"""Text and token ids around turns: the chat template of the model, the form of calls, and their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_dist.chat.ends import ends_of
from grpo_dist.chat.template import ControlTokens, encode, render
from grpo_dist.config import DataConfig, EnvironmentsConfig
from grpo_dist.environments.base import Message
from grpo_dist.environments.calls import CODE, CODE_STOP, CallParser, read_chat, read_code, resolve_format
from grpo_dist.environments.records import Action
from grpo_dist.types import Task, Thought

# In place of the last assistant's content, so that what follows it can be found in the rendered text.
_MARK = "@@CONTENT-OF-THE-LAST-ASSISTANT@@"
_CUT = "\n... {} characters cut ...\n"


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as the template writes it.

    Attributes:
        text: all of it, up to where the next action begins.
        before: what precedes the content of the last assistant message.
        tail: what follows it.
    """

    text: str
    before: str
    tail: str


class Renderer:
    """Reads actions and renders observations for one tokenizer. Made once per engine; holds no episode."""

    def __init__(
        self,
        tokenizer: Any,
        data: DataConfig,
        settings: EnvironmentsConfig,
        parser: CallParser | None = None,
    ) -> None:
        """``parser``: of calls in the form `environments.call_format`; not needed for code blocks. Raises
        ValueError where no token ends an action.
        """
        self._tokenizer, self._parser = tokenizer, parser
        self.has_template = data.chat_template == "model"
        self._kwargs, self._day = dict(data.template_kwargs), data.day
        self.call_format = resolve_format(settings.call_format, template_text(tokenizer, data))
        self._max_tool_tokens = settings.max_tool_tokens
        self.ends = ends_of(data, tokenizer)
        self.ends.check()  # a text of `sampling.stop` ends no action
        self.controls = ControlTokens(tokenizer)

    @property
    def in_place(self) -> bool:
        """Whether results follow a call in the same message."""
        return self.call_format == CODE

    def stop(self, task: Task) -> tuple[str, ...]:
        """Return the strings that end an action of ``task``. They are part of it. Without tools a code block
        is an answer like any other.
        """
        return (CODE_STOP,) if self.in_place and task.tools else ()

    def parse(self, text: str, ids: Sequence[int], task: Task, thought: Thought) -> Action:
        """Read an action with its calls.

        Args:
            text: decoded without special tokens.
            ids: all tokens of the action.
        """
        if not task.tools:
            return Action(text)
        ended = self.ended(ids)
        if self.in_place:
            return read_code(text, [schema["function"]["name"] for schema in task.tools], ended=ended)
        assert self._parser is not None, f"a parser for {self.call_format} calls is needed"
        answer = _behind_thought(self.raw(ids), thought)
        calls, malformed = read_chat(answer, self.call_format, self._parser, task.tools)
        return Action(text, calls, malformed)

    def ended(self, ids: Sequence[int]) -> bool:
        """Return whether the policy ended its message."""
        return self.ends.ended(ids)

    def raw(self, ids: Sequence[int]) -> str:
        """Decode an action with its special tokens, without the one that ends it."""
        return self._tokenizer.decode(
            self.ends.without(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def text(self, ids: Sequence[int]) -> str:
        """Decode an action without special tokens, and without the one that ends it."""
        return self._tokenizer.decode(
            self.ends.without(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def ids(self, text: str) -> list[int]:
        return encode(text, self._tokenizer)

    def prompt(self, task: Task) -> str:
        """Render the prompt of ``task``, up to where the first action begins."""
        return self._render(task.messages, task)

    def conversation(
        self, task: Task, history: Sequence[Message], content: str, observed: Sequence[Message]
    ) -> Rendered:
        """Render ``history``, an assistant message of ``content``, and what was ``observed`` behind it."""
        text = self._render((*history, _assistant(content), *observed), task)
        marked = self._render((*history, _assistant(_MARK), *observed), task)
        before, mark, tail = marked.rpartition(_MARK)
        if not mark:
            raise ValueError(
                "the model's chat template does not show the content of assistant messages, so no turn can "
                "follow it; use another `data.chat_template`"
            )
        return Rendered(text, before, tail)

    def cut(self, result: str) -> str:
        """Return a tool's result with at most `environments.max_tool_tokens` tokens: its middle is cut."""
        result = self.controls.as_text(result)
        limit = self._max_tool_tokens
        half = (
            len(result) // 2 if len(result) <= 64 * limit else 32 * limit
        )  # bounds the cost of a huge result
        while True:
            shown = _middle_cut(result, half)
            count = len(self.ids(shown))
            if count <= limit:
                return shown
            if half == 0:  # the mark alone is longer
                return self._tokenizer.decode(self.ids(shown)[:limit], skip_special_tokens=True)
            half = min(half - 1, int(half * limit / count))

    def _render(self, messages: Sequence[Message], task: Task) -> str:
        tools = [dict(tool) for tool in task.tools] if task.tools and not self.in_place else None
        return render(self._tokenizer, messages, self._kwargs, day=self._day, tools=tools)


def template_text(tokenizer: Any, data: DataConfig) -> str | None:
    """Return the chat template in use for conversations with tools; None for plain text."""
    if data.chat_template == "none" or not getattr(tokenizer, "chat_template", None):
        return None
    return tokenizer.get_chat_template(tools=[{}])


def result_messages(names: Sequence[str], results: Sequence[str]) -> list[Mapping[str, Any]]:
    """Return a tool message for each result."""
    return [
        {"role": "tool", "name": name, "content": text} for name, text in zip(names, results, strict=True)
    ]


def _assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _behind_thought(text: str, thought: Thought) -> str:
    """Return what follows the thought; "" where it is not closed. A call inside a thought does not count."""
    is_open = thought.prompt == "opens" or text.lstrip().startswith(thought.opening)
    if thought.closing in text:
        return text.partition(thought.closing)[2]
    return "" if is_open else text


def _middle_cut(text: str, half: int) -> str:
    if 2 * half >= len(text) - 1:
        return text
    return text[:half] + _CUT.format(len(text) - 2 * half) + text[len(text) - half :]
