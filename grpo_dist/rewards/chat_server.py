"""Client for OpenAI-compatible chat servers: retries, a rate limit and a deadline for each attempt."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any

from grpo_dist.secrets import masked_text

if TYPE_CHECKING:
    import openai

_TRANSIENT = frozenset({408, 409, 425, 429})  # statuses worth a retry, like any of 500 and above
_LONGEST_REASON = 300  # characters
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0


class NoReply(Exception):
    """The server gave no usable reply after all retries; the message says why."""


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """How requests are sent.

    Attributes:
        timeout_s: deadline of one attempt in seconds, both for the first byte and for the whole reply.
        max_retries: further attempts after a connection error, a timeout or a transient status.
        requests_per_minute: rate limit over attempts; None for no limit.
        max_tokens: longest reply, in tokens of the server's model.
        extra_body: further fields of every request, e.g. vLLM's ``structured_outputs``.
    """

    timeout_s: float = 30.0
    max_retries: int = 3
    requests_per_minute: float | None = None
    max_tokens: int = 8
    extra_body: Mapping[str, Any] = field(default_factory=dict)


class RateLimit:
    """Evenly spaced permits, shared by threads.

    Each `wait` returns at least 60 / ``per_minute`` seconds after the previous one. Permits do not accumulate
    into bursts, so a server that counts requests in windows never sees more than the limit.
    """

    def __init__(
        self,
        per_minute: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._interval, self._clock, self._sleep = 60.0 / per_minute, clock, sleep
        self._lock, self._next = Lock(), clock()

    def wait(self) -> None:
        """Block until the next permit."""
        with self._lock:
            now = self._clock()
            permitted = max(now, self._next)
            self._next = permitted + self._interval
        if permitted > now:
            self._sleep(permitted - now)


class ChatServer:
    """Client of ``model`` at ``base_url``; samples greedily (temperature 0).

    Args:
        api_key: None for a server without keys.
        sleep: replaces `time.sleep` between attempts in tests.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        settings: ChatSettings = ChatSettings(),
        *,
        api_key: str | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        import openai  # takes a second, and few runs have a judge

        self._openai = openai
        self._model, self._settings, self._sleep = model, settings, sleep
        per_minute = settings.requests_per_minute
        self._limit = RateLimit(per_minute) if per_minute else None
        # An error message may quote the request, so secrets are masked in what is shown.
        self._secrets = {"api_key": api_key, "base_url": base_url, "extra": dict(settings.extra_body)}
        # Retries of the client itself would bypass the rate limit.
        self._client = openai.OpenAI(
            base_url=base_url, api_key=api_key or "none", timeout=settings.timeout_s, max_retries=0
        )

    def reply(self, messages: list[dict[str, str]]) -> str:
        """Return the text of the first choice. Raises NoReply."""
        attempts = self._settings.max_retries + 1
        for attempt in range(attempts):
            if self._limit is not None:
                self._limit.wait()  # bounded: by the configured rate
            try:
                return self._ask(messages)
            except self._openai.APIConnectionError as error:  # includes timeouts
                reason, pause = self._shown(f"{type(error).__name__}: {error}"), None
            except self._openai.APIStatusError as error:
                reason, pause = self._shown(f"HTTP {error.status_code}: {error.message}"), _retry_after(error)
                if error.status_code < 500 and error.status_code not in _TRANSIENT:
                    raise NoReply(reason) from error
            except (self._openai.OpenAIError, ValueError) as error:
                raise NoReply(self._shown(f"malformed reply ({type(error).__name__}: {error})")) from error
            if attempt < attempts - 1:
                self._sleep(min(_LONGEST_PAUSE_S, pause if pause is not None else _pause(attempt)))
        raise NoReply(f"{reason} (after {attempts} tries)")

    def close(self) -> None:
        self._client.close()

    def _shown(self, message: str) -> str:
        return masked_text(message, self._secrets)[:_LONGEST_REASON]

    def _ask(self, messages: list[dict[str, str]]) -> str:
        end = time.monotonic() + self._settings.timeout_s
        with self._client.chat.completions.with_streaming_response.create(
            model=self._model,
            messages=messages,  # type: ignore[arg-type]  # plain dicts are what is sent
            temperature=0.0,
            max_tokens=self._settings.max_tokens,
            extra_body=dict(self._settings.extra_body) or None,
        ) as response:
            body = b""
            try:
                for part in response.iter_bytes():
                    body += part
                    # The client's timeout covers one read; a server that sends slowly would never hit it.
                    if time.monotonic() > end:
                        raise TimeoutError(f"the reply has not ended after {self._settings.timeout_s:g} s")
            except Exception as error:  # those of the HTTP library, which openai has changed before
                reason = f"{type(error).__name__}: {error}"
                raise self._openai.APIConnectionError(
                    message=reason, request=response.http_request
                ) from error
        return _text(body)


def _text(body: bytes) -> str:
    """Return the text of the first choice. Raises ValueError when there is none."""
    reply = json.loads(body)
    try:
        content = reply["choices"][0]["message"]["content"]
    except (TypeError, LookupError):  # not the expected lists and mappings
        content = None
    if not isinstance(content, str):
        raise ValueError("no choice with a text")
    return content


def api_key(variable: str | None) -> str | None:
    """Read the key from environment variable ``variable``; None for None.

    Raises ValueError when it is unset.
    """
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ValueError(
            f"kwargs.api_key_env = {variable}: the variable is not set; export it (on every node of an "
            "existing cluster), or leave api_key_env out for a server without keys"
        )
    return key


def _pause(attempt: int) -> float:
    """Return seconds before the next attempt: doubling, with jitter so that workers do not retry at once."""
    return _FIRST_PAUSE_S * 2**attempt * random.uniform(0.75, 1.25)


def _retry_after(error: openai.APIStatusError) -> float | None:
    """Return the server's Retry-After in seconds; None when absent or given as a date."""
    header = error.response.headers.get("retry-after", "")
    return float(header) if header.replace(".", "", 1).isdigit() else None
