"""Records exchanged between an episode and its environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from grpo_dist.environments.base import Messages
from grpo_dist.types import ToolCall

_SURROGATE = re.compile("[\ud800-\udfff]")


def without_surrogates(value: Any) -> Any:
    """Replace each half of a surrogate pair in JSON-like ``value``. JSON can hold a lone one ("\\ud800"), but
    neither tokenizers nor files of records take it.
    """
    if isinstance(value, str):
        return value if value.isascii() else _SURROGATE.sub("\ufffd", value)
    if isinstance(value, Mapping):
        return {without_surrogates(key): without_surrogates(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(without_surrogates(own) for own in value)
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
        object.__setattr__(self, "name", without_surrogates(self.name))
        object.__setattr__(self, "arguments", without_surrogates(self.arguments))


@dataclass(frozen=True, slots=True)
class Action:
    """What the policy wrote in one turn.

    Attributes:
        text: decoded without special tokens.
        calls: the tool calls in it, in order.
        malformed: why a call in it cannot be read; "": none is malformed.
        unfinished: it stopped at the end of a code block that is no call, so sampling continues at once.
    """

    text: str
    calls: tuple[Call, ...] = ()
    malformed: str = ""
    unfinished: bool = False


@dataclass(frozen=True, slots=True)
class Observed:
    """The environment's answer.

    Attributes:
        observation: text of the environment other than results of calls; () and "" with ``done``.
        calls: one for each call of the action, and one of outcome "malformed" for a malformed action. Their
            results are cut where they are rendered.
        failed: why the environment itself could not answer; "": it did. The sample cannot be scored.
    """

    observation: str | Messages = ""
    calls: tuple[ToolCall, ...] = ()
    reward: float | None = None
    done: bool = False
    failed: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "observation", without_surrogates(self.observation))
        object.__setattr__(self, "failed", without_surrogates(self.failed))
        calls = tuple(
            replace(
                call,
                name=without_surrogates(call.name),
                arguments=without_surrogates(call.arguments),
                result=without_surrogates(call.result),
            )
            for call in self.calls
        )
        object.__setattr__(self, "calls", calls)
