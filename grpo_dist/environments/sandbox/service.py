"""The Python tool on a sandbox service that speaks SandboxFusion's API: POST /run_code.

The service starts a new process for each request. To restore variables, the episode's earlier code runs again
before the new code, and its output is discarded. Results that depend on time may differ.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_dist.config.environments import SandboxConfig
from grpo_dist.config.secrets import masked_text
from grpo_dist.environments.sandbox import cells
from grpo_dist.environments.sandbox.frames import KeptOutput
from grpo_dist.environments.sandbox.host import ProcessFailure

if TYPE_CHECKING:
    import httpx

_ATTEMPTS, _FIRST_PAUSE_S = 4, 0.5
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_GRACE_S = 30.0  # for the service's queue, and to start a process
_OWN_MB = 1024  # address space of Python and its packages, which the service also counts
_OUTCOME_BY_EXIT_CODE = {0: "ok", 1: "error", 3: "memory"}  # as `cells.replay` exits
_REASON = 500  # maximum characters of an error


class CodeService:
    """Runs code on a service."""

    def __init__(self, settings: SandboxConfig, output_kb: int) -> None:
        assert settings.url, "without an address code runs in processes"
        self._output_kb = output_kb
        self._settings, self._url = settings, settings.url.rstrip("/") + "/run_code"
        self._earlier: dict[str, list[tuple[str, float]]] = {}  # code and seconds of each call
        self._source = Path(cells.__file__).read_text()
        self._client: httpx.AsyncClient | None = None

    async def start(self) -> list[str]:
        """Check the service by running a line. Raises ProcessFailure if that fails."""
        import httpx  # only here: few runs have a service

        # Every episode may have an open request.
        self._client = httpx.AsyncClient(limits=httpx.Limits(max_connections=None), trust_env=False)
        outcome, output, _ = await self.run("", "print(6 * 7)", self._settings.call_s)
        await self.end("")
        if (outcome, output) != ("ok", "42\n"):
            raise ProcessFailure("error", f"{self._masked(self._url)} printed {output[:_REASON]!r} for 6 * 7")
        where = self._masked(self._settings.url or "")
        return [f"sandbox: code runs at {where}, whose isolation is not checked here"]

    async def run(self, episode: str, code: str, timeout_s: float) -> tuple[str, str, float]:
        """Run ``code`` after the episode's earlier code. Raises ProcessFailure."""
        earlier = self._earlier.get(episode, [])
        earlier_s = sum(seconds for _, seconds in earlier)
        limit_s = timeout_s + 2 * earlier_s
        begin = time.monotonic()
        reply = await self._post(self._request([text for text, _ in earlier], code, limit_s), limit_s)
        outcome, output, seconds = self._read(episode, reply, timeout_s, time.monotonic() - begin)
        seconds = max(0.0, seconds - earlier_s)
        self._earlier.setdefault(episode, []).append((code, seconds))
        return outcome, output, seconds

    async def end(self, episode: str) -> None:
        self._earlier.pop(episode, None)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    def _request(self, earlier: list[str], code: str, limit_s: float) -> dict[str, Any]:
        texts = json.dumps(json.dumps([earlier, code]))  # a JSON text as a Python literal
        program = f"{self._source}\n\nimport json\n\nreplay(*json.loads({texts}))\n"
        return {
            "code": program,
            "language": "python",
            "compile_timeout": limit_s,
            "run_timeout": limit_s,
            "memory_limit_MB": self._settings.memory_mb + _OWN_MB,
        }

    async def _post(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Send a request, with retries after transient failures; the service is stateless."""
        import httpx

        assert self._client is not None, "run before start"
        reason = ""
        for attempt in range(_ATTEMPTS):
            if attempt:
                await asyncio.sleep(_FIRST_PAUSE_S * 2 ** (attempt - 1))
            try:
                response = await self._client.post(self._url, json=request, timeout=limit_s + _GRACE_S)
                if response.status_code == 200:
                    reply = response.json()
                    if isinstance(reply, dict):
                        return reply
                    reason = "the reply is not a JSON object"
                    break
                reason = f"HTTP {response.status_code}: {response.text}"
                if response.status_code not in _TRANSIENT:
                    break
            except httpx.TimeoutException:
                reason = f"no reply within {limit_s + _GRACE_S:g} s"
            except (httpx.HTTPError, ValueError) as error:
                reason = f"{type(error).__name__}: {error}"
        masked = self._masked(reason)[:_REASON]
        detail = f"the sandbox service does not answer ({masked})"
        raise ProcessFailure("error", detail, lost=False, infrastructure=True)

    def _read(
        self, episode: str, reply: dict[str, Any], timeout_s: float, elapsed_s: float
    ) -> tuple[str, str, float]:
        """Return outcome, output and seconds of the whole code. Raises ProcessFailure."""
        ran = reply.get("run_result")
        if reply.get("status") == "SandboxError" or not isinstance(ran, dict):
            reason = str(reply.get("message") or "it ran nothing")[:_REASON]
            detail = f"the sandbox service failed ({self._masked(reason)})"
            raise ProcessFailure("error", detail, lost=False, infrastructure=True)
        output_buffer = KeptOutput(self._output_kb * 1024)
        # The code prints to stdout; Python's fatal errors are in stderr.
        for part in ("stdout", "stderr"):
            output_buffer.add(str(ran.get(part) or "").encode(errors="replace"))
        output = output_buffer.bytes().decode(errors="replace")
        if ran.get("status") == "TimeLimitExceeded":
            self._earlier.pop(episode, None)
            raise ProcessFailure("timeout", f"no result within {timeout_s:g} s", output=output)
        code, seconds = ran.get("return_code"), ran.get("execution_time")
        if code not in _OUTCOME_BY_EXIT_CODE:
            self._earlier.pop(episode, None)
            raise ProcessFailure("died", f"the process ended with exit status {code}", output=output)
        return _OUTCOME_BY_EXIT_CODE[code], output, seconds if isinstance(seconds, int | float) else elapsed_s

    def _masked(self, text: str) -> str:
        return masked_text(text, {"url": self._settings.url})
