"""What policy and environment say to each other in an episode: actions, and answers to them."""

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
    """Replace each half of a surrogate pair in JSON-like ``value``. JSON can hold a lone one ("\\ud800"), but
    neither tokenizers nor files of records take it.
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
        for name in ("name", "arguments"):
            object.__setattr__(self, name, replace_surrogates(getattr(self, name)))


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
        for name in ("observation", "calls", "failed", "request"):
            object.__setattr__(self, name, replace_surrogates(getattr(self, name)))


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
