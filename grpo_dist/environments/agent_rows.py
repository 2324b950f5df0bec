"""Token rows of an external agent, built from its OpenAI API requests. See `agent` for the server.

request 1   S U               row 0   S U | A
request 2   S U A T           row 0   S U | A T | A        a recorded turn is the prefix: append the rest
request 3   S U' A            row 1   S U' A | A           the agent rewrote its history: a new row

A history that extends a recorded one, including its answer, continues that row: earlier turns keep their
sampled ids. Any other history begins a new row, whose context is rendered from its messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from grpo_dist.chat.template import REJECTED, parse_arguments
from grpo_dist.environments.dialogue import Budgets, Dialogue, EpisodeEnds, Renderer
from grpo_dist.environments.episode import Action, Generation, Observed, join_text
from grpo_dist.runtime.seeds import turn_seed
from grpo_dist.types import FurtherRow, Prompt, Rollout, Sampling, Task, Turn

_Fields = Mapping[str, Any]

_READ = {"model", "messages", "prompt", "tools", "max_tokens", "max_completion_tokens", "stop", "stream"}
_HARMLESS = {
    *("stream_options", "user", "metadata", "store", "seed", "service_tier", "prompt_cache_key"),
    *("safety_identifier", "timeout"),
}
_REFUSED_MORE = 10  # refused requests allowed beyond the turns before the episode ends


class Refused(ValueError):
    """A request answered with an OpenAI API error. ``budget``: the finish reason it causes."""

    def __init__(self, message: str, code: str | None = None, param: str | None = None, budget: str = ""):
        super().__init__(message)
        self.budget = budget
        error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
        self.reply: dict[str, Any] = {"status": 400, "error": error}


def check_parameters(body: _Fields, sampling: Sampling, ignored: Sequence[str]) -> None:
    """Raise Refused for a parameter that would change the sampling distribution, which training relies on.

    ``ignored``: parameters that the run ignores.
    """
    fixed: dict[str, tuple[Any, ...]] = {
        "temperature": (sampling.temperature,),
        "top_p": (sampling.top_p,),
        "min_p": (sampling.min_p,),
        "top_k": (sampling.top_k, -1) if not sampling.top_k else (sampling.top_k,),
        "tool_choice": ("auto", "none"),
        "parallel_tool_calls": (True,),
        "response_format": ({"type": "text"},),
        "suffix": ("",),
        "repetition_penalty": (1,),
    }
    fixed |= dict.fromkeys(("n", "best_of"), (1,)) | dict.fromkeys(("logit_bias",), ({},))
    absent = ("presence_penalty", "frequency_penalty", "logprobs", "top_logprobs", "echo")
    fixed |= dict.fromkeys(absent, (0,))
    for name, value in body.items():
        if value is None or name in ignored or name in _READ or name in _HARMLESS:
            continue
        if name not in fixed:
            raise Refused(f"unsupported parameter {name!r}; remove it", "unsupported_parameter", name)
        if value not in fixed[name]:
            usual = "several requests" if name in ("n", "best_of") else f"{fixed[name][0]!r}"
            raise Refused(
                f"{name} = {value!r} is not supported: training samples as the run's configuration says; "
                f"expected {usual}; leave it out, or name it in environment_kwargs.ignore",
                "unsupported_value",
                name,
            )


def normalised(messages: Any) -> list[dict[str, Any]]:
    """Return chat messages with text content, as chat templates expect. Raises Refused."""
    if not isinstance(messages, list) or not messages or not all(isinstance(m, Mapping) for m in messages):
        raise Refused("`messages` must be a non-empty list of messages", param="messages")
    names: dict[str, str] = {}  # call id -> tool name
    out = []
    for number, message in enumerate(messages):
        where, role = f"messages.{number}", message.get("role")
        if role not in ("system", "developer", "user", "assistant", "tool"):
            raise Refused(f"`{where}.role` = {role!r} is not supported", param=where)
        entry: dict[str, Any] = {"role": "system" if role == "developer" else role}
        entry["content"] = _content(message.get("content"), where)
        if role == "assistant" and message.get("tool_calls"):
            try:
                calls = [(c.get("id"), c["function"]["name"], c["function"]["arguments"])
                         for c in message["tool_calls"]]  # fmt: skip
            except (KeyError, TypeError, AttributeError):
                raise Refused(f"`{where}.tool_calls` must be function calls", param=where) from None
            names |= {call_id: name for call_id, name, _ in calls}
            entry["tool_calls"] = [
                {
                    "type": "function",
                    "id": call_id,
                    "function": {"name": name, "arguments": parse_arguments(text)},
                }
                for call_id, name, text in calls
            ]
        if role == "tool":
            entry |= {"tool_call_id": message.get("tool_call_id")}
            entry["name"] = message.get("name") or names.get(str(message.get("tool_call_id")), "")
        out.append(entry)
    return out


def _content(content: Any, where: str) -> str:
    try:
        return join_text(content)
    except TypeError:
        why = f"`{where}.content` must be text; images and audio are not supported"
        raise Refused(why, param=where) from None


def _key(message: _Fields) -> str:
    """Return an equal key for copies of a turn: frameworks may change call ids and strip answers."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    is_assistant = message["role"] == "assistant"
    content = message["content"].strip() if is_assistant else message["content"]
    return json.dumps([message["role"], content, calls], sort_keys=True)


@dataclass(slots=True)
class _Thread:
    """A growing conversation.

    ``keys``: of its messages with the last answer, or the plain text. None: it cannot continue.
    """

    dialogue: Dialogue
    keys: Any
    tools: str = ""


class AgentRows:
    """One episode: `ask` and `add_action` alternate.

    Args:
        max_length: longest row, tokens.
        tokens: the episode's token budget after its contexts, sampled and given.
    """

    def __init__(
        self, renderer: Renderer, prompt: Prompt, sampling: Sampling, *, max_length: int, tokens: int
    ) -> None:
        assert prompt.task is not None, "a prompt without a task has no agent"
        self._renderer, self._prompt, self._sampling = renderer, prompt, sampling
        self._task, self._max_length, self._tokens = prompt.task, max_length, tokens
        ignored = prompt.task.kwargs.get("ignore") or ()
        self._ignored = (ignored,) if isinstance(ignored, str) else tuple(ignored)
        self._threads: list[_Thread] = []
        self._order: list[_Thread] = []  # one per action
        self._asking: tuple[_Thread, Any] | None = None  # the open request, with its history's keys
        self.stop: tuple[str, ...] = ()
        self.room = 0  # maximum tokens of the next action
        self.is_last = False  # an action of `room` tokens exhausts the budget

    @property
    def context(self) -> list[int]:
        """Token ids of the next action's prompt."""
        assert self._asking is not None
        return self._asking[0].dialogue.context

    def ask(self, body: _Fields) -> None:
        """Append a request's new messages to the matching row, or begin a row. Raises Refused."""
        self._asking, ignored = None, self._ignored
        check_parameters(body, self._sampling, ignored)
        stop = body.get("stop") or ()
        self.stop = (stop,) if isinstance(stop, str) else tuple(stop)
        most = body.get("max_completion_tokens") or body.get("max_tokens")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise Refused("`stop` must be non-empty texts", param="stop")
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
            raise Refused(f"`max_tokens` = {most!r} must be a positive integer", param="max_tokens")
        thread, keys = self._chat(body) if "messages" in body else self._text(body)
        context, used = len(thread.dialogue.context), thread.dialogue.used
        used += sum(other.dialogue.kept for other in self._threads if other is not thread)
        room = min(self._tokens - used, self._max_length - context)
        if room < 1:
            thread.keys = None
            raise Refused(
                f"the conversation has {context} tokens, and the episode {used} after its first request; "
                f"model.max_length = {self._max_length} and sampling.max_new_tokens = {self._tokens} leave "
                "none for an answer",
                "context_length_exceeded",
                budget="length",
            )
        self.room, self.is_last = (room, True) if most is None or most >= room else (most, False)
        self._asking = thread, keys

    def add_action(self, sampled: Generation) -> Action:
        """Append the sampled tokens; return the action with the reply to the agent."""
        assert self._asking is not None
        (thread, keys), self._asking = self._asking, None
        prompt_tokens = len(thread.dialogue.context)
        action = thread.dialogue.add_action(sampled)
        self._order.append(thread)
        text, ids, reason = action.text, sampled.token_ids, sampled.finish_reason
        if sampled.finish_reason == "stop" and not self._renderer.ended(ids):
            cuts = [text.find(stop) for stop in self.stop if stop in text]
            text = text[: min(cuts)] if cuts else text
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(ids),
                 "total_tokens": prompt_tokens + len(ids)}  # fmt: skip
        if isinstance(keys, str):
            thread.keys = None if self._renderer.ended(ids) else keys + action.text
            return replace(action, reply={"choice": {"text": text, "finish_reason": reason}, "usage": usage})
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if action.calls:
            openings = [text.find(o) for o in self._renderer.openings if o in text]
            message["content"] = text[: min(openings)].rstrip() or None if openings else None
            message["tool_calls"] = [
                # Mistral's chat templates reject ids that are not 9 letters and digits.
                {"id": f"call{len(self._order):03}{number:02}", "type": "function",
                 "function": {"name": call.name, "arguments": call.arguments}}
                for number, call in enumerate(action.calls)
            ]  # fmt: skip
            reason = "tool_calls"
        (entry,) = normalised([message])
        thread.keys = [*keys, _key(entry)]
        choice = {"message": message, "finish_reason": reason}
        return replace(action, reply={"choice": choice, "usage": usage})

    def rollout(
        self, sample: int, finish_reason: str, reward: float | None = None, failed: str = ""
    ) -> Rollout:
        """Return the finished episode, its rows in order of their start.

        Args:
            reward: the agent's reward for the episode, if it reported one.
            failed: why the episode cannot be scored; shown in its last turn.

        An episode without any sampled token ends with "error".
        """
        if not self._order:
            failed = failed or "it made no request that the run takes"
            turn = Turn(0, 0, "", f"the agent got no answer from the policy: {failed}")
            return Rollout.without_tokens(self._prompt.uid, sample, turns=(turn,))
        threads = [thread for thread in self._threads if thread in self._order]
        parts = [thread.dialogue.rollout(sample, finish_reason) for thread in threads]
        first, further = parts[0], []
        offsets = [sum(len(part.rows) for part in parts[:index]) for index in range(len(parts))]
        for thread, part in zip(threads, parts, strict=True):
            if part is not first:
                start = thread.dialogue.start
                arrays = part.completion_ids, part.logprobs, part.policy_versions, part.sampled
                further.append(FurtherRow(start, *arrays, routes=part.routes, kept=part.kept))
            further += part.further_rows
        turns_of = [iter(part.turns) for part in parts]
        turns: list[Turn] = []
        for thread in self._order:
            index = threads.index(thread)
            turn = next(turns_of[index])
            turns.append(replace(turn, row=turn.row + offsets[index]))
        turns[-1] = replace(turns[-1], reward=reward, observation=failed or turns[-1].observation)
        start = threads[0].dialogue.start
        return replace(
            first,
            text=turns[-1].text,
            turns=tuple(turns),
            further_rows=tuple(further),
            context_ids=None if np.array_equal(start, self._prompt.token_ids) else start,
        )

    def _chat(self, body: _Fields) -> tuple[_Thread, list[str]]:
        renderer = self._renderer
        if not renderer.has_template:
            raise Refused("`data.chat_template` is none; use /v1/completions")
        messages = normalised(body.get("messages"))
        if messages[-1]["role"] == "assistant":
            where = f"messages.{len(messages) - 1}"
            why = "the last message is the assistant's; a prefilled answer is not supported"
            raise Refused(why, param=where)
        tools = [] if body.get("tool_choice") == "none" else body.get("tools") or []
        if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
            raise Refused("`tools` must be a list of functions", param="tools")
        if tools and renderer.is_in_place:
            raise Refused("the model's chat template has no tools, or `environments.call_format` is code; "
                          "describe them in the messages", param="tools")  # fmt: skip
        keys, tools_key = [_key(message) for message in messages], json.dumps(tools, sort_keys=True)
        messages = renderer.controls.as_text(messages)
        try:
            for thread in reversed(self._threads):
                size = len(thread.keys or ())
                is_same = isinstance(thread.keys, list) and keys[:size] == thread.keys
                if is_same and tools_key == thread.tools and len(keys) > size:
                    thread.keys = None  # until the new messages are appended
                    thread.dialogue.observe(Observed(messages[size:]))
                    return thread, keys
            task = Task(self._task.environment, messages=tuple(messages), tools=tuple(tools))
            text = renderer.prompt(task)
        except REJECTED as error:
            why = f"the model's chat template rejects the messages ({error})"
            raise Refused(why, param="messages") from error
        return self._begin(task, renderer.ids(text), text, tools_key), keys

    def _text(self, body: _Fields) -> tuple[_Thread, str]:
        text = body.get("prompt")
        if not isinstance(text, str):
            raise Refused("`prompt` must be a single text", param="prompt")
        for thread in reversed(self._threads):
            if isinstance(thread.keys, str) and text.startswith(thread.keys):
                tail, thread.keys = self._renderer.controls.as_text(text[len(thread.keys) :]), None
                thread.dialogue.observe(Observed(tail))
                return thread, text
        # The observation follows in the same text, as after a stop text.
        plain: str = self._renderer.controls.as_text(text)
        task = Task(self._task.environment, stop=(" ",))
        return self._begin(task, self._renderer.prompt_ids(plain), plain), text

    def _begin(self, task: Task, ids: Sequence[int], text: str, tools: str = "") -> _Thread:
        prompt = replace(
            self._prompt,
            token_ids=np.array(ids, np.int32),
            task=task,
            thought=replace(self._prompt.thought, prompt="").advance_given(text),
        )
        thread = _Thread(Dialogue(self._renderer, prompt), None, tools)
        self._threads.append(thread)
        return thread


async def play_agent(
    rows: AgentRows, ends: EpisodeEnds, budgets: Budgets, *, seed: int, sample: int
) -> Rollout:
    """Answer an agent's requests until it exits. Once a budget is exhausted, requests get an error that names
    it, and the budget is the finish reason.
    """
    action, reason, turns, calls = Action(""), "", 0, 0
    for number in range(budgets.turns + _REFUSED_MORE + 1):
        observed = await ends.act(action, number)
        if observed.failed and not reason:
            return rows.rollout(sample, "error", failed=observed.failed)
        if observed.request is None:
            return rows.rollout(sample, reason or "stop", observed.reward)
        try:
            if turns == budgets.turns:
                budget = f"environments.max_turns = {turns} requests have been answered"
                raise Refused(budget, "max_turns", budget="turns")
            rows.ask(observed.request)
        except Refused as refused:
            reason, action = reason or refused.budget, Action("", reply=refused.reply)
            continue
        room = min(rows.room, budgets.turn_tokens or rows.room)
        generation = await ends.generate(rows.context, turn_seed(seed, turns), room, rows.stop)
        turns += 1
        if generation.finish_reason == "length" and rows.is_last and room == rows.room:
            reason = reason or "length"
        action = rows.add_action(generation)
        calls += len(action.calls)
        if budgets.tool_calls is not None and calls > budgets.tool_calls:
            return rows.rollout(sample, "tool_limit")
    return rows.rollout(sample, reason or "error", failed="the agent keeps sending requests after refusals")
