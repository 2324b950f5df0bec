"""What passes between an episode and its environment."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_dist.environments.base import Messages
from grpo_dist.types import ToolCall


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call as parsed from an action.

    Attributes:
        arguments: a JSON object; with ``raw`` the text of a code block, which is the tool's first argument.
    """

    name: str
    arguments: str
    raw: bool = False


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
        observation: what the environment says besides results of calls; () and "" with ``done``.
        calls: one for each call of the action, and one of outcome "malformed" for a malformed action. Their
            results are cut where they are rendered.
        failed: why the environment itself could not answer; "": it did. The sample cannot be scored.
    """

    observation: str | Messages = ""
    calls: tuple[ToolCall, ...] = ()
    reward: float | None = None
    done: bool = False
    failed: str = ""
