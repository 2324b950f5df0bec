"""Messages between policy and environment in an episode: actions and answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from grpo_dist.environments.base import Messages
from grpo_dist.types import KeptTokens, Routes, ToolCall

_SURROGATE = re.compile("[\ud800-\udfff]")


def replace_surrogates(value: Any) -> Any:
    """Replace lone surrogates in JSON-like ``value``. JSON can hold them ("\\ud800"), but tokenizers and
    record files reject them.
    """
    if isinstance(value, str):
        return value if value.isascii() else _SURROGATE.sub("\ufffd", value)
    if isinstance(value, Mapping):
        return {replace_surrogates(key): replace_surrogates(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(replace_surrogates(item) for item in value)
    if isinstance(value, ToolCall):
        return replace(value, **{f.name: replace_surrogates(getattr(value, f.name)) for f in fields(value)})
    return value


def join_text(content: Any) -> str:
    """Return the content of a message as text: a list of text parts is joined, and None is "".

    Raises TypeError for any other content, such as an image.
    """
    if isinstance(content, str) or content is None:
        return content or ""
    if isinstance(content, list) and all(isinstance(p, Mapping) and p.get("type") == "text" for p in content):
        return "".join(str(part.get("text", "")) for part in content)
    raise TypeError(f"{str(content)[:100]!r} is no text")


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call as parsed from an action.

    Attributes:
        arguments: a JSON object; with ``raw`` the text of a code block: a JSON object if the tool has several
            arguments, else its only argument.
    """

    name: str
    arguments: str
    raw: bool = False

    def __post_init__(self) -> None:
        for name in ("name", "arguments"):
            object.__setattr__(self, name, replace_surrogates(getattr(self, name)))


@dataclass(frozen=True, slots=True)
class Action:
    """The policy's output in one turn.

    Attributes:
        text: decoded without special tokens.
        calls: the tool calls in it, in order.
        malformed: why a call cannot be parsed; "": none is malformed.
        unfinished: sampling stopped at a code block that is not a call, and continues at once.
        reply: reply to an agent's request, see `agent_rows`; None: no agent asked.
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
        observation: the environment's text besides call results; () or "" if ``done``.
        calls: one per call of the action; for a malformed action one with outcome "malformed". Results are
            cut at rendering.
        failed: why the environment could not answer, so the sample cannot be scored; "": it answered.
        request: body of an agent's next HTTP request; None: not an agent, or it has ended.
    """

    observation: str | Messages = ""
    calls: tuple[ToolCall, ...] = ()
    reward: float | None = None
    done: bool = False
    failed: str = ""
    request: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("observation", "calls", "failed", "request"):
            object.__setattr__(self, name, replace_surrogates(getattr(self, name)))


@dataclass(frozen=True, slots=True)
class Generation:
    """An engine's output for one request.

    Attributes:
        token_ids: [C], with EOS if sampled.
        logprobs: float32 [C], nats, under the sampling distribution.
        versions: int32 [C], weight version of each token.
        finish_reason: "stop" (EOS or a stop string) or "length".
        cached: prompt tokens found in the engine's prefix cache.
        routes: experts of the prompt and all sampled tokens but the last; None: not recorded.
    """

    token_ids: list[int]
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: str
    cached: int = 0
    routes: Routes | None = None
    kept: KeptTokens | None = None  # [C]; None: all were sampled from the whole vocabulary
