"""Serves the page over HTTP, and updates it while a run continues.

    GET /                  the page
    GET /manifest          the manifests of all runs; 304 while the ETag matches, 500 with the reason for an
                           unreadable run
    GET /RUN/PIECE         a piece of run number RUN, compressed JSON

Anyone who can connect can read the runs, so by default the server listens on loopback and checks the Host
header, which blocks DNS rebinding by other sites.
"""

from __future__ import annotations

import errno
import socket
import sys
import zlib
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from grpo_dist.errors import UserError
from grpo_dist.tools.report.line_files import packed
from grpo_dist.tools.report.page import live_page
from grpo_dist.tools.report.rollouts import AnswerReader
from grpo_dist.tools.report.run_dir import open_runs
from grpo_dist.tools.report.source import ReportLimits, Source, sources

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SLOWEST_S = 60.0  # maximum wait for a client to send or receive


class ReportServer(ThreadingHTTPServer):
    """The server; ``port`` 0 picks a free one, see `server_port`. Raises UserError if it cannot listen."""

    daemon_threads = True

    def __init__(self, host: str, port: int, runs: Sequence[Source]) -> None:
        self.runs = runs
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.names = LOOPBACK if host in LOOPBACK else None  # None: any name, as --host is public
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            port_in_use = getattr(error, "errno", None) == errno.EADDRINUSE
            raise UserError(
                f"--host {host} --port {port}: cannot listen "
                f"({getattr(error, 'strerror', None) or error})"
                + ("; the port is in use; choose another port, or 0 for a free one" if port_in_use else "")
            ) from error

    @property
    def url(self) -> str:
        host = str(self.server_address[0])
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report errors, except for clients that disconnect during an answer."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def serve(
    paths: Sequence[str], host: str, port: int, limits: ReportLimits, say: Callable[[str], None]
) -> None:
    """Serve until Ctrl-C. Raises UserError for a path that is not a run directory, or a port in use."""
    runs = open_runs(paths)
    with AnswerReader() as answers, ReportServer(host, port, sources(runs, limits, answers)) as server:
        say(f"{server.url} shows and follows {len(runs)} run(s); stop with Ctrl-C")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("stopped")


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer
    timeout = _SLOWEST_S

    def do_GET(self) -> None:
        name = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        if self.server.names is not None and name not in self.server.names:
            self._answer(403, b"this server answers only to its own name", "text/plain")
            return
        path = unquote(urlsplit(self.path).path).lstrip("/")
        if path == "":
            self._answer(200, live_page(self.server.runs).encode(), "text/html; charset=utf-8")
        elif path == "manifest":
            self._manifest()
        else:
            self._piece(path)

    def _manifest(self) -> None:
        manifests = []
        for source in self.server.runs:
            try:
                with source.lock:
                    manifests.append(source.manifest())
            except OSError as error:
                reason = f"{error.filename or source.run.path}: {error.strerror or error}"
                self._answer(500, reason.encode("utf-8", "replace"), "text/plain; charset=utf-8")
                return
        body = packed({"live": True, "runs": manifests})
        tag = f'"{zlib.crc32(body):08x}-{len(body)}"'
        if self.headers.get("If-None-Match") == tag:
            self._answer(304, b"", "application/json", ETag=tag)
        else:
            self._answer(200, body, "application/json", ETag=tag, Content_Encoding="gzip")

    def _piece(self, path: str) -> None:
        number, _, name = path.partition("/")
        try:
            source = self.server.runs[int(number)]
            with source.lock:
                body = source.piece(name)
        except (KeyError, IndexError, OSError, ValueError) as error:
            # Removed or rewritten since the manifest: the next manifest is correct.
            self._answer(404, str(error).encode("utf-8", "replace"), "text/plain")
            return
        self._answer(200, body, "application/json", Content_Encoding="gzip")

    def _answer(self, status: int, body: bytes, kind: str, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-cache")
        self.send_header("X-Content-Type-Options", "nosniff")
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if status != 304:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print no requests to the terminal."""
