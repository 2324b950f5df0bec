"""Token rows of one episode, token in, token out: sampled tokens are never decoded and retokenised.

    row 0   prompt | action, sampled | observation, given | action, sampled | ...
    row 1   the conversation, given again | action, sampled | ...       where the template rewrote the history

The chat template renders the conversation with the observation, and only the ids of the new suffix are
appended. If the text before the suffix differs from the row's (templates that drop thoughts of earlier
turns), the episode continues in a further row.

The policy acts and the environment answers until one of them ends the episode or a budget is exhausted.

    engine        action 0          action 1          action 2
    environment            answer            answer            done
    row     prompt a a a a  o o o o  a a a a  o o o o  a a a        a: sampled, o: given


| finish reason | the episode ended because |
|---|---|
| "stop" | the environment was done |
| "length" | the token budget ended before or during an action |
| "turns" | the last action that `environments.max_turns` allows did not end it |
| "tool_limit" | an action had more tool calls than were left; none of them was run |
| "error" | the environment failed, or the template rejects its answer; the sample cannot be scored |

`Renderer` parses actions and renders observations for one tokenizer: chat template, call format, results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Protocol

import numpy as np

from grpo_dist.chat.ends import ends_of
from grpo_dist.chat.template import REJECTED, ControlTokens, encode, encode_prompts, render
from grpo_dist.config import DataConfig, EnvironmentsConfig
from grpo_dist.environments.base import Message
from grpo_dist.environments.episode import Action, Generation, Observed
from grpo_dist.environments.tools import (
    CODE,
    CODE_STOP,
    CallParser,
    openings_of,
    read_chat,
    read_code,
    resolve_format,
)
from grpo_dist.runtime.seeds import turn_seed
from grpo_dist.types import FurtherRow, KeptTokens, Prompt, Rollout, Routes, Task, Thought, ToolCall, Turn

# Text around turns


# Replaces the last assistant message's content, to locate the text after it in the rendered text.
_MARK = "@@CONTENT-OF-THE-LAST-ASSISTANT@@"
_CUT = "\n... {} characters cut ...\n"
_SHOWN = "@@CONTENT-OF-MESSAGE-{}@@"  # replaces a message's content, to find out whether it is shown


class Rejected(ValueError):
    """The chat template rejects messages, or drops one."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as the template writes it.

    Attributes:
        text: everything up to the start of the next action.
        before: text before the content of the last assistant message.
        tail: text after it, with the prefill of the next action.
    """

    text: str
    before: str
    tail: str


class Renderer:
    """Parses actions and renders observations for one tokenizer. One per engine; holds no episode state."""

    def __init__(
        self,
        tokenizer: Any,
        data: DataConfig,
        settings: EnvironmentsConfig,
        parser: CallParser | None = None,
    ) -> None:
        """Raise ValueError if no token ends an action.

        ``parser``: for calls in `environments.call_format`; not needed for code blocks.
        """
        self._tokenizer, self._parser = tokenizer, parser
        self.has_template = data.chat_template == "model"
        self._kwargs, self._day = dict(data.template_kwargs), data.day
        self.call_format = resolve_format(settings.call_format, template_text(tokenizer, data))
        self._max_tool_tokens = settings.max_tool_tokens
        self.ends = ends_of(data, tokenizer)
        self.ends.check()
        self.controls = ControlTokens(tokenizer)
        self._shown_roles: set[tuple[str, ...]] = set()

    @property
    def is_in_place(self) -> bool:
        """Whether results follow a call in the same message."""
        return self.call_format == CODE

    @property
    def openings(self) -> Sequence[str]:
        """Texts that open a call."""
        parser_openings = () if self._parser is None else self._parser.openings
        return (*openings_of(self.call_format), *parser_openings)

    def stop(self, task: Task) -> tuple[str, ...]:
        """Return the strings that end an action of ``task``, as part of it: a code fence only with tools."""
        return (*((CODE_STOP,) if self.is_in_place and task.tools else ()), *task.stop)

    def parse(self, text: str, ids: Sequence[int], task: Task, thought: Thought, begin: str = "") -> Action:
        """Parse an action with its calls.

        Args:
            text: decoded without special tokens, starting with ``begin``.
            ids: all tokens of the action.
            begin: a prefill that counts as part of it.
        """
        if not task.tools:
            return Action(text)
        ended = self.ended(ids)
        if self.is_in_place:
            return read_code(text, [schema["function"]["name"] for schema in task.tools], ended=ended)
        assert self._parser is not None, f"a parser for {self.call_format} calls is needed"
        answer = _strip_thought(begin + self.raw(ids), thought)
        calls, malformed = read_chat(answer, self.call_format, self._parser, task.tools)
        return Action(text, calls, malformed)

    def ended(self, ids: Sequence[int]) -> bool:
        """Return whether the policy ended its message."""
        return self.ends.ended(ids)

    def raw(self, ids: Sequence[int]) -> str:
        """Decode an action with its special tokens, without its end token."""
        return self._tokenizer.decode(
            self.ends.strip(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def text(self, ids: Sequence[int]) -> str:
        """Decode an action without special tokens and without its end token."""
        return self._tokenizer.decode(
            self.ends.strip(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def prompt_ids(self, text: str) -> list[int]:
        """Tokenise a plain prompt, with the tokenizer's BOS if it adds one."""
        return encode_prompts([text], self._tokenizer)[0]

    def ids(self, text: str) -> list[int]:
        return encode(text, self._tokenizer)

    def prompt(self, task: Task) -> str:
        """Render the prompt of ``task`` with its prefill, up to the first action."""
        return self._render(task.messages, task)

    def conversation(
        self, task: Task, history: Sequence[Message], content: str, observed: Sequence[Message]
    ) -> Rendered:
        """Render ``history``, an assistant message of ``content``, and the ``observed`` messages."""
        text = self._render((*history, _assistant(content), *observed), task)
        marked = self._render((*history, _assistant(_MARK), *observed), task)
        before, mark, tail = marked.rpartition(_MARK)
        if not mark:
            raise ValueError(
                "the model's chat template does not show the content of assistant messages, so no turn can "
                "follow it; use another `data.chat_template`"
            )
        return Rendered(text, before, tail)

    def check_shown(self, task: Task, history: Sequence[Message], observed: Sequence[Message]) -> None:
        """Raise ValueError if the template drops a message of ``observed``, after an assistant message.

        Each sequence of roles is rendered once.
        """
        roles = tuple(message["role"] for message in observed)
        if roles in self._shown_roles:
            return
        marked = [{**message, "content": _SHOWN.format(number)} for number, message in enumerate(observed)]
        text = self._render((*history, _assistant(_MARK), *marked), task)
        dropped = [
            message
            for message, mark in zip(observed, marked, strict=True)
            # An assistant message with calls may have no content.
            if mark["content"] not in text and message["role"] != "assistant"
        ]
        if not dropped:
            self._shown_roles.add(roles)
        elif any(message["content"].strip() for message in dropped):
            raise ValueError(f"it does not show the message of role {dropped[0]['role']!r}")

    def cut(self, result: str) -> str:
        """Cut the middle of a tool's result to at most `environments.max_tool_tokens` tokens."""
        result = self.controls.as_text(result)
        limit = self._max_tool_tokens
        half = (
            len(result) // 2 if len(result) <= 64 * limit else 32 * limit
        )  # bounds the cost of a huge result
        while True:
            text = _middle_cut(result, half)
            count = len(self.ids(text))
            if count <= limit:
                return text
            if half == 0:  # the cut mark alone exceeds the limit
                return self._tokenizer.decode(self.ids(text)[:limit], skip_special_tokens=True)
            half = min(half - 1, int(half * limit / count))

    def _render(self, messages: Sequence[Message], task: Task) -> str:
        tools = [dict(tool) for tool in task.tools] if task.tools and not self.is_in_place else None
        text = render(self._tokenizer, messages, self._kwargs, day=self._day, tools=tools)
        return text + task.prefill


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


def _strip_thought(text: str, thought: Thought) -> str:
    """Return the text after the thought; "" if it is not closed. A call inside a thought does not count."""
    is_open = thought.prompt == "opens" or text.lstrip().startswith(thought.opening)
    if thought.closing in text:
        return text.partition(thought.closing)[2]
    return "" if is_open else text


def _middle_cut(text: str, half: int) -> str:
    if 2 * half >= len(text) - 1:
        return text
    return text[:half] + _CUT.format(len(text) - 2 * half) + text[len(text) - half :]


# Rows of tokens


@dataclass(slots=True)
class GrowingRow:
    """A row after its context; ``end``: index after its last sampled token."""

    context: list[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    end: int = 0
    routes: Routes | None = None  # from the last action's request: all tokens up to ``end`` but the last
    masks: list[tuple[KeptTokens | None, int]] = field(default_factory=list)  # per part up to ``end``

    def add(self, sampled: Generation) -> None:
        num_given = len(self.ids) - self.end
        self.masks += [(None, num_given), (sampled.kept, len(sampled.token_ids))]
        self.ids.extend(sampled.token_ids)
        self.logprobs.extend(sampled.logprobs.tolist())
        self.versions.extend(sampled.versions.tolist())
        self.sampled.extend([True] * len(sampled.token_ids))
        self.end, self.routes = len(self.ids), sampled.routes

    def give(self, ids: Sequence[int]) -> None:
        self.ids.extend(ids)
        self.logprobs.extend([0.0] * len(ids))
        self.versions.extend([-1] * len(ids))
        self.sampled.extend([False] * len(ids))

    def arrays(self) -> dict[str, Any]:
        """Return the arrays of a `FurtherRow` after its context, up to the last sampled token."""
        end = self.end
        return {
            "completion_ids": np.array(self.ids[:end], np.int32),
            "logprobs": np.array(self.logprobs[:end], np.float32),
            "policy_versions": np.array(self.versions[:end], np.int32),
            "sampled": None if all(self.sampled[:end]) else np.array(self.sampled[:end], dtype=bool),
            "routes": self.routes,
            "kept": KeptTokens.join(self.masks),
        }


class Dialogue:
    """One episode. `add_action` and `observe` alternate, except after an unfinished action."""

    def __init__(self, renderer: Renderer, prompt: Prompt) -> None:
        assert prompt.task is not None, "a prompt without a task has no turns"
        self._renderer, self._prompt, self._task = renderer, prompt, prompt.task
        self._rows = [GrowingRow(prompt.token_ids.tolist())]
        self._turns: list[Turn] = []
        self._history: list[Message] = list(prompt.task.messages)
        self._action_ids: list[int] = []
        self._action: Action | None = None  # not observed yet
        self._content = ""  # the assistant message so far, before the action
        self._written = ""  # text of the row as the template writes it, before that message's content
        self._lead: str | None = None  # the prefilled part of that content, such as <think>
        self._thought = prompt.thought  # as the action begins or continues it

    @property
    def context(self) -> list[int]:
        """Token ids of the next action's prompt."""
        row = self._rows[-1]
        return row.context + row.ids

    @property
    def used(self) -> int:
        """Tokens of the episode after its prompt, sampled and given."""
        row = self._rows[-1]
        length = len(row.context) + len(row.ids) - len(self._prompt.token_ids)
        return max(length, sum(len(row.ids) for row in self._rows))

    @property
    def start(self) -> np.ndarray:
        """Prompt token ids of the first row, int32 [P]."""
        return self._prompt.token_ids

    @property
    def kept(self) -> int:
        """Tokens of the episode up to the last sampled one of each row."""
        return sum(row.end for row in self._rows)

    def add_action(self, sampled: Generation) -> Action:
        """Append the sampled tokens and parse the action. The next call continues an unfinished action."""
        self._rows[-1].add(sampled)
        self._action_ids.extend(sampled.token_ids)
        begin = "" if self._content else self._prompt.prefill
        text = begin + self._renderer.text(self._action_ids)
        self._action = self._renderer.parse(text, self._action_ids, self._task, self._thought, begin)
        return self._action

    def observe(self, observed: Observed) -> None:
        """Append the environment's answer to the last action as given tokens; append none if ``done``.

        Raises Rejected if the chat template rejects the answer, after which the episode cannot go on.
        """
        calls = tuple(replace(call, result=self._renderer.cut(call.result)) for call in observed.calls)
        observation_messages = self._observation_messages(observed)
        text = "\n".join([*(call.result for call in calls), *(m["content"] for m in observation_messages)])
        # A failure is recorded, but the policy does not see it.
        self._end_turn(observed.failed or text, calls, observed.reward)
        if not (observed.done or observed.failed):
            self._give(calls, observation_messages, as_text=isinstance(observed.observation, str))
        self._action_ids = []

    def fail(self, reason: str) -> None:
        """Record after the last turn why the environment's answer cannot be used."""
        self._turns[-1] = replace(self._turns[-1], observation=f"{self._task.environment}: {reason}")

    def rollout(self, sample: int, finish_reason: str) -> Rollout:
        """Return the finished episode, without given tokens after the last action."""
        if self._action is not None:
            self._end_turn("", (), None)
        first, *others = (row for row in self._rows if row.end)
        return Rollout(
            prompt_uid=self._prompt.uid,
            sample=sample,
            finish_reason=finish_reason,
            text=self._turns[-1].text,
            turns=tuple(self._turns),
            further_rows=tuple(FurtherRow(np.array(r.context, np.int32), **r.arrays()) for r in others),
            **first.arrays(),
        )

    def _observation_messages(self, observed: Observed) -> list[Message]:
        """Return the environment's observation as messages without control tokens."""
        messages = observed.observation
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}] if messages else []
        return [
            {**message, "content": self._renderer.controls.as_text(message["content"])}
            for message in messages
        ]

    def _end_turn(self, observation: str, calls: tuple[ToolCall, ...], reward: float | None) -> None:
        assert self._action is not None, "an observation without an action"
        row = len(self._rows) - 1
        text, end = self._action.text, self._rows[-1].end
        part = self._thought.prompt
        if part and self._renderer.controls.any_in(self._thought.closing):
            part = ""  # a special token is not in the text, so the end of the thought is invisible
        self._turns.append(Turn(row, end, text, observation, calls, reward, part))
        self._action = None

    def _give(self, calls: Sequence[ToolCall], observation_messages: list[Message], *, as_text: bool) -> None:
        """Append the answer's tokens. ``as_text``: the environment's observation is text."""
        ids, written = self._action_ids, self._renderer.raw(self._action_ids)
        results = [call.result for call in calls]
        following: str | None = None  # in the same message
        if not self._renderer.ended(ids):
            if self._renderer.is_in_place and calls and not observation_messages:
                blocks = "".join(f"```output\n{result.rstrip()}\n```\n" for result in results)
                following = blocks if written.endswith("\n") else f"\n{blocks}"
            elif self._task.stop and as_text and not calls:
                following = "".join(message["content"] for message in observation_messages)
        if following is not None:
            self._content += written + following
            self._give_text(following)
            return
        if not self._task.messages:
            self._content = ""
            parts = [*results, *(message["content"] for message in observation_messages)]
            self._give_text("".join(f"\n{part}\n" for part in parts), self._task.prefill)
            return
        if self._renderer.is_in_place:  # a template without tools may not support their messages
            messages = [*({"role": "user", "content": text} for text in results), *observation_messages]
        else:
            messages = [*result_messages([call.name for call in calls], results), *observation_messages]
        self._continue(self._content + written, messages or [{"role": "user", "content": ""}])

    def _give_text(self, text: str, prefill: str = "") -> None:
        """Append ``text`` and the next ``prefill`` after the last action, whose thought may continue."""
        self._rows[-1].give(self._renderer.ids(text + prefill))
        thought = self._thought.advance(self._turns[-1].text).advance_given(text)
        # A scored prefill is the beginning of the next action's text.
        self._thought = thought if self._prompt.prefill else thought.advance(prefill)

    def _continue(self, content: str, messages: Sequence[Message]) -> None:
        """Append the template's text after ``content``, or begin a row with the whole text."""
        if self._lead is None:
            self._written = prompt = self._renderer.prompt(self._task)
            bare = self._conversation(content, messages)
            self._lead = prompt.removeprefix(bare.before) if prompt.startswith(bare.before) else ""
        whole = self._lead + content
        rendered = self._conversation(whole, messages)
        self._thought = self._prompt.thought
        self._history += [{"role": "assistant", "content": whole}, *messages]
        self._content = ""
        if self._is_kept(content, rendered):
            self._rows[-1].give(self._tail_ids(rendered.tail))
            self._written += content + rendered.tail
        else:
            self._rows.append(GrowingRow(self._renderer.ids(rendered.text)))
            self._written = rendered.text

    def _conversation(self, content: str, messages: Sequence[Message]) -> Rendered:
        """Render the conversation with ``messages`` after the policy's message. Raises Rejected."""
        try:
            self._renderer.check_shown(self._task, self._history, messages)
            return self._renderer.conversation(self._task, self._history, content, messages)
        except REJECTED as error:
            raise Rejected(str(error)) from error

    def _is_kept(self, content: str, rendered: Rendered) -> bool:
        """Return whether the tail still follows the row's text, ignoring white space."""
        if not rendered.text.endswith(rendered.tail):
            return False
        before = rendered.text[: len(rendered.text) - len(rendered.tail)]
        return _squashed(before) == _squashed(self._written + content)

    def _tail_ids(self, tail: str) -> list[int]:
        """Tokenise the tail, without the end-of-turn token if the policy has sampled one."""
        ids = self._renderer.ids(tail)
        if not self._renderer.ended(self._action_ids):
            return ids
        for index, token in enumerate(ids[:3]):
            if token in self._renderer.ends.ids:
                return ids[index + 1 :]
            if self._renderer.text([token]).strip():
                break
        return ids


def _squashed(text: str) -> str:
    return "".join(text.split())


# The loop over turns


@dataclass(frozen=True, slots=True)
class Budgets:
    """Limits of an episode; None: no limit. ``tokens``: after its prompt, sampled and given."""

    tokens: int
    turns: int
    turn_tokens: int | None = None
    tool_calls: int | None = None

    @classmethod
    def from_config(cls, settings: EnvironmentsConfig, *, tokens: int) -> Budgets:
        return cls(tokens, settings.max_turns, settings.max_turn_tokens, settings.max_tool_calls)


class EpisodeEnds(Protocol):
    """Both ends of an episode: the engine and the environment."""

    async def generate(
        self, token_ids: list[int], seed: int, max_tokens: int, stop: Sequence[str] = ()
    ) -> Generation: ...
    async def act(self, action: Action, turn: int) -> Observed: ...


async def play(rows: Dialogue, ends: EpisodeEnds, budgets: Budgets, *, seed: int) -> str:
    """Play an episode and return its finish reason. ``rows`` then hold its tokens.

    The last turn's action is answered, too, because it may end the episode. The answer is then cut off,
    because no action follows it.
    """
    numbers, calls = count(), 0
    for turn in range(budgets.turns):
        action = await _sample_action(rows, ends, budgets, seed, numbers)
        if action is None:
            return "length"
        calls += len(action.calls)
        if budgets.tool_calls is not None and calls > budgets.tool_calls:
            return "tool_limit"
        observed = await ends.act(action, turn)
        try:
            rows.observe(observed)
        except Rejected as error:
            rows.fail(
                f"the model's chat template rejects the answer ({error}); return text, or messages that the "
                "template shows"
            )
            return "error"
        if observed.failed:
            return "error"
        if observed.done:
            return "stop"
        if rows.used >= budgets.tokens and turn + 1 < budgets.turns:
            return "length"
    return "turns"


async def _sample_action(
    rows: Dialogue, ends: EpisodeEnds, budgets: Budgets, seed: int, numbers: count[int]
) -> Action | None:
    """Sample an action, with further requests if a stop string ends one before the action is complete.

    Returns None if the episode's token budget ends before the action. An action cut at
    ``budgets.turn_tokens`` counts as complete.
    """
    left = budgets.tokens if budgets.turn_tokens is None else budgets.turn_tokens
    while True:
        room = min(left, budgets.tokens - rows.used)
        output = await ends.generate(list(rows.context), turn_seed(seed, next(numbers)), room)
        action = rows.add_action(output)
        left -= len(output.token_ids)
        if rows.used >= budgets.tokens and (output.finish_reason == "length" or action.unfinished):
            return None
        if not action.unfinished or left <= 0:
            return action
