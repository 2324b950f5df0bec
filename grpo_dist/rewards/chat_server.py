"""Short chats with any server that speaks the OpenAI protocol: retries, a rate limit, one deadline a try."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import openai

from grpo_dist.rewards.rate_limit import RateLimit
from grpo_dist.secrets import masked_text

_AGAIN = frozenset({408, 409, 425, 429})  # statuses that may pass; as may any of 500 and above
_LONGEST_REASON = 300  # characters
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0


class NoReply(Exception):
    """No usable reply, after all retries; the message says why."""


class ChatServer:
    """Replies of ``model`` at ``base_url``, greedy (temperature 0), at most ``max_tokens`` long.

    Args:
        api_key: None for a server that asks for none.
        timeout_s: longest one try may take, seconds: until the reply begins, and until it has ended.
        max_retries: further tries after one that failed by connection, timeout or a status that may pass.
        requests_per_minute: None for no limit. Tries count, not questions.
        extra_body: further fields of every request, e.g. vLLM's ``structured_outputs``.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 30.0,
        max_retries: int = 3,
        requests_per_minute: float | None = None,
        max_tokens: int = 8,
        extra_body: Mapping[str, Any] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._model, self._max_tokens, self._retries = model, max_tokens, max_retries
        self._extra, self._sleep, self._timeout_s = dict(extra_body or {}), sleep, timeout_s
        self._limit = RateLimit(requests_per_minute) if requests_per_minute else None
        # A server may repeat in its errors what it was sent.
        self._secrets = {"api_key": api_key, "base_url": base_url, "extra": self._extra}
        # The client's own retries would not pass through the limit.
        self._client = openai.OpenAI(
            base_url=base_url, api_key=api_key or "none", timeout=timeout_s, max_retries=0
        )

    def reply(self, messages: list[dict[str, str]]) -> str:
        """The text of the first choice. Raises NoReply."""
        for attempt in range(self._retries + 1):
            if self._limit is not None:
                self._limit.wait()  # bounded: by the rate that was asked for
            try:
                return self._ask(messages)
            except openai.APIConnectionError as error:  # includes timeouts
                reason, pause = self._shown(f"{type(error).__name__}: {error}"), None
            except openai.APIStatusError as error:
                reason, pause = self._shown(f"HTTP {error.status_code}: {error.message}"), _retry_after(error)
                if error.status_code < 500 and error.status_code not in _AGAIN:
                    raise NoReply(reason) from error
            except (openai.OpenAIError, ValueError) as error:
                raise NoReply(self._shown(f"malformed reply ({type(error).__name__}: {error})")) from error
            if attempt < self._retries:
                self._sleep(min(_LONGEST_PAUSE_S, pause if pause is not None else _pause(attempt)))
        raise NoReply(f"{reason} (after {self._retries + 1} tries)")

    def close(self) -> None:
        self._client.close()

    def _shown(self, message: str) -> str:
        return masked_text(message, self._secrets)[:_LONGEST_REASON]

    def _ask(self, messages: list[dict[str, str]]) -> str:
        end = time.monotonic() + self._timeout_s
        with self._client.chat.completions.with_streaming_response.create(
            model=self._model,
            messages=messages,  # type: ignore[arg-type]  # plain dicts are what is sent
            temperature=0.0,
            max_tokens=self._max_tokens,
            extra_body=self._extra or None,
        ) as response:
            body = b""
            try:
                for part in response.iter_bytes():
                    body += part
                    # The client's own timeout is of one read: a server that drips would never meet it.
                    if time.monotonic() > end:
                        raise TimeoutError(f"the reply has not ended after {self._timeout_s:g} s")
            except Exception as error:  # those of the HTTP library, which openai has changed before
                reason = f"{type(error).__name__}: {error}"
                raise openai.APIConnectionError(message=reason, request=response.http_request) from error
        return _text(body)


def _text(body: bytes) -> str:
    """The text of the first choice. Raises ValueError for what has none."""
    reply = json.loads(body)
    try:
        content = reply["choices"][0]["message"]["content"]
    except (TypeError, LookupError):  # not the lists and mappings that they should be
        content = None
    if not isinstance(content, str):
        raise ValueError("no choice with a text")
    return content


def api_key(variable: str | None) -> str | None:
    """The key in environment variable ``variable``; None where none is asked for. Raises ValueError when it
    is not set.
    """
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ValueError(
            f"kwargs.api_key_env = {variable}: it is not set in the environment; export it (on every node of "
            "a cluster that is joined), or leave api_key_env out for a server without keys"
        )
    return key


def _pause(attempt: int) -> float:
    """Doubling, with jitter, so that many workers do not come back at once."""
    return _FIRST_PAUSE_S * 2**attempt * random.uniform(0.75, 1.25)


def _retry_after(error: openai.APIStatusError) -> float | None:
    """Seconds that the server asks to wait; None where it does not say (or gives a date)."""
    header = error.response.headers.get("retry-after", "")
    return float(header) if header.replace(".", "", 1).isdigit() else None
