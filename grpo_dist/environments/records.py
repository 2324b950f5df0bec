"""What passes between an episode and its environment."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_dist.environments.base import Messages
from grpo_dist.types import ToolCall


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call as parsed from an action. ``arguments``: JSON object, or the code of a code block."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Action:
    """What the policy wrote in one turn.

    Attributes:
        text: decoded without special tokens.
        calls: the tool calls in it, in order.
        malformed: why a call in it cannot be read; "": none is malformed.
        unfinished: a stop string ended it before it was over; the policy goes on at once.
    """

    text: str
    calls: tuple[Call, ...] = ()
    malformed: str = ""
    unfinished: bool = False


@dataclass(frozen=True, slots=True)
class Observed:
    """The environment's answer.

    Attributes:
        observation: results of calls or the environment's observation; () and "" with ``done``.
        calls: one for each call of the action.
        failed: why the environment itself could not answer; "": it did. The sample cannot be scored.
    """

    observation: str | Messages = ""
    calls: tuple[ToolCall, ...] = ()
    reward: float | None = None
    done: bool = False
    failed: str = ""
