"""One episode: the policy acts and the environment answers, until one of them ends it or a budget runs out.

    engine        action 0          action 1          action 2
    environment            answer            answer            done
    row     prompt a a a a  o o o o  a a a a  o o o o  a a a        a: sampled, o: given

| finish reason | the episode ended because |
|---|---|
| "stop" | the environment was done |
| "length" | no token was left for an action, or for the rest of one |
| "turns" | the last action that `environments.max_turns` allows did not end it |
| "tool_limit" | an action had more tool calls than were left; none of them was run |
| "error" | the environment failed; the sample cannot be scored |
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Protocol

import numpy as np

from grpo_dist.config import EnvironmentsConfig
from grpo_dist.environments.base import Messages
from grpo_dist.runtime.seeds import turn_seed
from grpo_dist.types import KeptTokens, Routes, ToolCall

_SURROGATE = re.compile("[\ud800-\udfff]")


def replace_surrogates(value: Any) -> Any:
    """Replace each half of a surrogate pair in JSON-like ``value``. JSON can hold a lone one ("\\ud800"), but
    neither tokenizers nor files of records take it.
    """
    if isinstance(value, str):
        return value if value.isascii() else _SURROGATE.sub("\ufffd", value)
    if isinstance(value, Mapping):
        return {replace_surrogates(key): replace_surrogates(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(replace_surrogates(item) for item in value)
    return value


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call as parsed from an action.

    Attributes:
        arguments: a JSON object; with ``raw`` the text of a code block, which is one where a tool has several
            arguments, else the only one.
    """

    name: str
    arguments: str
    raw: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", replace_surrogates(self.name))
        object.__setattr__(self, "arguments", replace_surrogates(self.arguments))


@dataclass(frozen=True, slots=True)
class Action:
    """What the policy wrote in one turn.

    Attributes:
        text: decoded without special tokens.
        calls: the tool calls in it, in order.
        malformed: why a call in it cannot be read; "": none is malformed.
        unfinished: it stopped at the end of a code block that is no call, so sampling continues at once.
        reply: to the request of an agent, see `agent_rows`; None: no agent has asked.
    """

    text: str
    calls: tuple[Call, ...] = ()
    malformed: str = ""
    unfinished: bool = False
    reply: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Observed:
    """The environment's answer.

    Attributes:
        observation: text of the environment other than results of calls; () and "" with ``done``.
        calls: one for each call of the action, and one of outcome "malformed" for a malformed action. Their
            results are cut where they are rendered.
        failed: why the environment itself could not answer; "": it did. The sample cannot be scored.
        request: what an agent asks next, the body of its HTTP request; None: it is no agent, or has ended.
    """

    observation: str | Messages = ""
    calls: tuple[ToolCall, ...] = ()
    reward: float | None = None
    done: bool = False
    failed: str = ""
    request: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "observation", replace_surrogates(self.observation))
        object.__setattr__(self, "failed", replace_surrogates(self.failed))
        object.__setattr__(self, "request", replace_surrogates(self.request))
        calls = tuple(
            replace(
                call,
                name=replace_surrogates(call.name),
                arguments=replace_surrogates(call.arguments),
                result=replace_surrogates(call.result),
            )
            for call in self.calls
        )
        object.__setattr__(self, "calls", calls)


@dataclass(frozen=True, slots=True)
class Generation:
    """What an engine sampled for one request.

    Attributes:
        token_ids: [C], with EOS where it was sampled.
        logprobs: float32 [C], nats, under the distribution sampled from.
        versions: int32 [C], of the weights that produced each token.
        finish_reason: "stop" (EOS or a stop string) or "length".
        cached: tokens of its prompt that were found in the engine's cache.
        routes: the experts of the prompt and all sampled tokens but the last; None: they are not recorded.
    """

    token_ids: list[int]
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: str
    cached: int = 0
    routes: Routes | None = None
    kept: KeptTokens | None = None  # [C]; None: all were sampled from the whole vocabulary


class EpisodeEngine(Protocol):
    async def generate(self, token_ids: list[int], seed: int, max_tokens: int) -> Generation: ...


class EpisodeEnvironment(Protocol):
    async def act(self, action: Action, turn: int) -> Observed: ...


class EpisodeRows(Protocol):
    """See `grpo_dist.environments.dialogue.Dialogue`."""

    @property
    def context(self) -> Sequence[int]:
        """Token ids that the next action is sampled behind."""
        ...

    @property
    def used(self) -> int:
        """Tokens of the episode behind its prompt, sampled and given."""
        ...

    def add_action(self, sampled: Generation) -> Action: ...
    def observe(self, observed: Observed) -> None: ...


@dataclass(frozen=True, slots=True)
class Budgets:
    """What an episode may use. ``tokens``: behind its prompt, sampled and given. None: no limit."""

    tokens: int
    turns: int
    turn_tokens: int | None = None
    tool_calls: int | None = None

    @classmethod
    def from_config(cls, settings: EnvironmentsConfig, *, tokens: int) -> Budgets:
        return cls(tokens, settings.max_turns, settings.max_turn_tokens, settings.max_tool_calls)


async def play(
    rows: EpisodeRows,
    engine: EpisodeEngine,
    environment: EpisodeEnvironment,
    budgets: Budgets,
    *,
    seed: int,
) -> str:
    """Play an episode from its start and return its finish reason. ``rows`` then hold its tokens.

    The action of the last turn is answered like any other: it may be the one that ends the episode well. The
    answer is then cut off, because no action follows it.
    """
    numbers, calls = count(), 0
    for turn in range(budgets.turns):
        action = await _sampled(rows, engine, budgets, seed, numbers)
        if action is None:
            return "length"
        calls += len(action.calls)
        if budgets.tool_calls is not None and calls > budgets.tool_calls:
            return "tool_limit"
        observed = await environment.act(action, turn)
        rows.observe(observed)
        if observed.failed:
            return "error"
        if observed.done:
            return "stop"
        if rows.used >= budgets.tokens and turn + 1 < budgets.turns:
            return "length"
    return "turns"


async def _sampled(
    rows: EpisodeRows, engine: EpisodeEngine, budgets: Budgets, seed: int, numbers: count[int]
) -> Action | None:
    """Sample an action, with further requests while a stop string ends one before the action is over.

    Returns None when the tokens of the episode end before the action does. One cut at
    ``budgets.turn_tokens`` is an action.
    """
    left = budgets.tokens if budgets.turn_tokens is None else budgets.turn_tokens
    while True:
        room = min(left, budgets.tokens - rows.used)
        own_seed = turn_seed(seed, next(numbers))
        output = await engine.generate(list(rows.context), own_seed, room)
        action = rows.add_action(output)
        left -= len(output.token_ids)
        if rows.used >= budgets.tokens and (output.finish_reason == "length" or action.unfinished):
            return None
        if not action.unfinished or left <= 0:
            return action
