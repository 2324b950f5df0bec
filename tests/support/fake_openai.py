"""Fake chat server with scripted statuses, delays and malformed replies."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# A reply: text, or (status, body, headers).
Reply = str | tuple[int, bytes, dict[str, str]]


class StandIn:
    """Replies to each chat with ``reply(request body, index of the request)`` and records the requests."""

    def __init__(self, reply: Callable[[dict[str, Any], int], Reply]) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.drip = 0  # bytes sent every 50 ms; 0 for all at once
        self.drip_headers = 0  # the same of the headers
        self.most_at_once, self._at_once, self._lock = 0, 0, threading.Lock()
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with stand_in._lock:
                    number = len(stand_in.requests)
                    stand_in.requests.append(body)
                    stand_in.headers.append({k.lower(): v for k, v in self.headers.items()})
                    stand_in._at_once += 1
                    stand_in.most_at_once = max(stand_in.most_at_once, stand_in._at_once)
                try:
                    self._send(reply(body, number))
                finally:
                    with stand_in._lock:
                        stand_in._at_once -= 1

            def _send(self, answer: Reply) -> None:
                status, content, headers = (200, chat(answer), {}) if isinstance(answer, str) else answer
                self.send_response(status)
                for name, value in {"Content-Type": "application/json", **headers}.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                if stand_in.drip_headers:
                    self._drip_headers()
                self.end_headers()
                size = stand_in.drip or len(content)
                with suppress(ConnectionError):  # the client gave up
                    for first in range(0, len(content), size):
                        self.wfile.write(content[first : first + size])
                        time.sleep(0.05 if stand_in.drip else 0)

            def _drip_headers(self) -> None:
                lines, self._headers_buffer = b"".join(self._headers_buffer), []
                with suppress(ConnectionError):  # the client gave up
                    for first in range(0, len(lines), stand_in.drip_headers):
                        self.wfile.write(lines[first : first + stand_in.drip_headers])
                        time.sleep(0.05)

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.base_url = f"http://127.0.0.1:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def chat(text: str | None) -> bytes:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    return json.dumps(
        {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
    ).encode()


def replied(value: Any) -> Reply:
    """Reply with any JSON."""
    return 200, json.dumps(value).encode(), {}


def failing(status: int, **headers: str) -> Reply:
    return status, b'{"error": {"message": "not now"}}', {k.replace("_", "-"): v for k, v in headers.items()}


def after(seconds: float, text: str) -> str:
    time.sleep(seconds)
    return text
