"""Client of a scoring server over HTTP, with deadlines, retries, a rate limit and a circuit breaker.

threads of rewards --post--> retries --> one attempt --> event loop of the endpoint, one thread
                             |           deadline over name look-up, connection, headers and body
                             |           rate limit over attempts
                             breaker     opens after several failed requests in a row
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pydantic import Field, PositiveFloat, PositiveInt

from grpo_dist.config import Count, Section
from grpo_dist.config.secrets import masked_text
from grpo_dist.runtime.concurrency import LoopThread

if TYPE_CHECKING:
    import httpx

_TRANSIENT = frozenset({408, 409, 425, 429})  # statuses worth a retry, like all from 500 on
_LONGEST_REASON = 300  # characters
_LONGEST_REPLY = 1 << 24  # bytes; far above any score or verdict
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_SLACK_S = 30.0  # for the event loop of a busy machine to end an attempt that is past its deadline
_CLOSE_S = 10.0


class NoReply(Exception):
    """The server gave no usable reply after all retries; the message has the reason.

    ``status``: status of the last HTTP reply; None without a reply.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message, status)
        self.status = status

    def __str__(self) -> str:
        return str(self.args[0])


class EndpointSettings(Section):
    """How requests are sent; fields of the `kwargs` of `judge`, `remote` and `generative`."""

    api_key_env: str | None = Field(None, description="environment variable that holds the key")
    max_retries: Count = Field(3, description="after a connection error, a timeout or a transient status")
    timeout_s: PositiveFloat = Field(30.0, description="deadline of an attempt, from start to last byte")
    requests_per_minute: PositiveFloat | None = Field(None, description="limit of the run, retries included")
    break_after: PositiveInt = Field(
        5, description="failed requests in a row after which none is sent for `break_s`"
    )
    break_s: PositiveFloat = Field(10.0, description="first pause for an unreachable server; it doubles")
    headers: dict[str, str] = Field({}, description="headers of every request")


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
        self._lock, self._next = threading.Lock(), clock()

    def wait(self) -> None:
        """Block until the next permit."""
        with self._lock:
            now = self._clock()
            permitted = max(now, self._next)
            self._next = permitted + self._interval
        if permitted > now:
            self._sleep(permitted - now)


class CircuitBreaker:
    """Stops requests to an unreachable server, so a step does not wait for every retry of every sample.

    closed --``after`` failures in a row--> open --``first_s``--> one trial --success--> closed
                                             ^-----twice as long------failure

    Requests that were sent before it opened may fail later; such failures do not prolong a pause.
    """

    LONGEST_S = 300.0

    def __init__(self, after: int, first_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._after, self._first_s, self._clock = after, first_s, clock
        self._lock = threading.Lock()
        self._failures, self._pause_s, self._opens_at = 0, first_s, 0.0
        self._on_trial = False

    def permits(self) -> bool:
        """Return whether a request may be sent. An open breaker permits one after each pause."""
        with self._lock:
            if self._failures < self._after:
                return True
            if self._clock() < self._opens_at:
                return False
            self._opens_at = self._clock() + self._pause_s  # other requests wait for this one's outcome
            self._on_trial = True
            return True

    @property
    def is_open(self) -> bool:
        return self._failures >= self._after

    def succeeded(self) -> None:
        with self._lock:
            self._failures, self._pause_s, self._on_trial = 0, self._first_s, False

    def failed(self) -> None:
        with self._lock:
            was_open, self._failures = self._failures >= self._after, self._failures + 1
            if was_open and not self._on_trial:
                return
            if was_open:
                self._pause_s, self._on_trial = min(2 * self._pause_s, self.LONGEST_S), False
            self._opens_at = self._clock() + self._pause_s


class Endpoint:
    """Posts JSON to one server, from any thread.

    Args:
        workers: clients of the run that share `requests_per_minute`.
        extra_secrets: a tree whose secret values are masked in messages, e.g. a body's further fields.
        sleep: replaces `time.sleep` between attempts in tests.

    Raises ValueError where the variable of `api_key_env` is not set.
    """

    def __init__(
        self,
        base_url: str,
        settings: EndpointSettings,
        *,
        workers: int = 1,
        extra_secrets: Any = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._url, self._settings, self._sleep = base_url.rstrip("/"), settings, sleep
        key, rate = _api_key(settings.api_key_env), settings.requests_per_minute
        headers = settings.headers | ({"Authorization": f"Bearer {key}"} if key else {})
        # An error message may quote the request, so its secrets are masked.
        self._secrets = {"api_key": key, "url": base_url, "headers": headers, "extra": extra_secrets}
        self._limit = RateLimit(rate / workers) if rate else None
        self.breaker = CircuitBreaker(settings.break_after, settings.break_s)
        self._headers = {"Content-Type": "application/json"} | headers
        self._client: httpx.AsyncClient | None = None
        self._loop = LoopThread("endpoint")

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the reply to ``body``, parsed. Raises NoReply."""
        try:
            sent = json.dumps(body).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise NoReply(
                self._masked(f"the request is no JSON ({type(error).__name__}: {error})")
            ) from error
        if not self.breaker.permits():
            raise NoReply(f"not asked: the last {self._settings.break_after} requests or more failed")
        # An open breaker's trial is one attempt, which only tests whether the server is back.
        attempts = 1 if self.breaker.is_open else self._settings.max_retries + 1
        for attempt in range(attempts):
            if self._limit is not None:
                self._limit.wait()  # bounded: by the configured rate
            reason, status, pause = "", None, None
            try:
                status, retry_after, content = self._send(path, sent)
            except ConnectionError as error:
                reason = str(error)
            else:
                if 200 <= status < 300:
                    return self._parsed(content)
                reason, pause = f"HTTP {status}: {_message(content)}", retry_after
                if status < 500 and status not in _TRANSIENT:
                    self.breaker.succeeded()  # the server is reachable
                    raise NoReply(self._masked(reason), status)
            if attempt < attempts - 1:
                self._sleep(min(_LONGEST_PAUSE_S, pause if pause is not None else _pause(attempt)))
        self.breaker.failed()
        raise NoReply(f"{self._masked(reason)} (after {attempts} tries)", status)

    def close(self) -> None:
        if self._client is not None:
            self._loop.submit(self._client.aclose()).result(_CLOSE_S)
        self._loop.stop(_CLOSE_S)

    def chat(
        self,
        model: str,
        messages: Sequence[Mapping[str, str]],
        max_tokens: int,
        extra_body: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Return the greedy reply of ``model`` (temperature 0) over the OpenAI chat API.

        ``extra_body``: further fields of the request, e.g. vLLM's ``structured_outputs``. Raises NoReply.
        """
        body = {"model": model, "messages": messages, "temperature": 0.0, "max_tokens": max_tokens}
        reply = self.post("/chat/completions", body | dict(extra_body))
        try:
            content = reply["choices"][0]["message"]["content"]
        except (TypeError, LookupError):  # not the expected lists and mappings
            content = None
        if not isinstance(content, str):
            raise NoReply("malformed reply (no choice with a text)")
        return content

    def _parsed(self, content: bytes) -> Any:
        self.breaker.succeeded()
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise NoReply(self._masked(f"malformed reply ({type(error).__name__}: {error})")) from error

    def _masked(self, message: str) -> str:
        return masked_text(message, self._secrets)[:_LONGEST_REASON]

    def _send(self, path: str, body: bytes) -> tuple[int, float | None, bytes]:
        """Return status, Retry-After in seconds and body. Raises ConnectionError, also at the deadline.

        Uses an event loop, since only there a deadline covers name look-up, headers and body together: a
        blocking client's timeouts cover single reads, which a slow server never exceeds.
        """
        timeout_s = self._settings.timeout_s
        future = self._loop.submit(self._attempt(f"{self._url}{path}", body, timeout_s))
        try:
            return future.result(timeout_s + _SLACK_S)
        except TimeoutError as error:
            future.cancel()
            raise ConnectionError(f"the reply has not ended after {timeout_s:g} s") from error

    async def _attempt(self, url: str, body: bytes, timeout_s: float) -> tuple[int, float | None, bytes]:
        import httpx  # takes a third of a second, and few runs use a server

        if self._client is None:
            # The callers' threads limit the connections, and `_send` has the deadlines.
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
            self._client = httpx.AsyncClient(headers=self._headers, timeout=None, limits=limits)
        content = b""
        async with asyncio.timeout(timeout_s):
            try:
                async with self._client.stream("POST", url, content=body) as response:
                    async for part in response.aiter_bytes():
                        content += part
                        if len(content) > _LONGEST_REPLY:
                            raise ConnectionError(f"the reply is longer than {_LONGEST_REPLY} bytes")
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise ConnectionError(f"{type(error).__name__}: {error}") from error
        return response.status_code, _seconds(response.headers.get("retry-after", "")), content


def _api_key(variable: str | None) -> str | None:
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


def _message(content: bytes) -> str:
    """Return the error message in the body of an OpenAI-compatible server's reply, else its beginning."""
    text = content[:_LONGEST_REASON].decode(errors="replace")
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, TypeError, LookupError, RecursionError):  # any other body
        return text


def _pause(attempt: int) -> float:
    """Return seconds before the next attempt: doubling, with jitter so that workers do not retry at once."""
    return _FIRST_PAUSE_S * 2**attempt * random.uniform(0.75, 1.25)


def _seconds(header: str) -> float | None:
    """Return a Retry-After in seconds; None when absent or given as a date."""
    return float(header) if header.replace(".", "", 1).isdecimal() else None
