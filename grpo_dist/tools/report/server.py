"""The page over HTTP on this machine, kept up to date while a run goes on.

    GET /                  the page
    GET /manifest          the manifests of all runs; 304 while they are what the ETag says, 500 and why where
                           a run cannot be read
    GET /RUN/PIECE         a piece of run number RUN, compressed JSON

Whoever may open a connection may read the run: so it listens on the loopback address unless it is told
otherwise, and there answers only requests that call it by a name of that address (a page from elsewhere whose
own name is made to point here does not).
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
from grpo_dist.tools.report.answers import AnswerReader
from grpo_dist.tools.report.line_files import packed
from grpo_dist.tools.report.page import live_page
from grpo_dist.tools.report.run_dir import open_runs
from grpo_dist.tools.report.source import ReportLimits, Source, sources

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SLOWEST_S = 60.0  # a client that takes longer to ask or to listen is let go


class ReportServer(ThreadingHTTPServer):
    """``port`` 0: a free one; `server_port` says which. Raises UserError where it cannot listen there."""

    daemon_threads = True

    def __init__(self, host: str, port: int, runs: Sequence[Source]) -> None:
        self.runs = runs
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.names = LOOPBACK if host in LOOPBACK else None  # by any name, where it was told to be seen
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            taken = getattr(error, "errno", None) == errno.EADDRINUSE
            raise UserError(
                f"--host {host} --port {port}: cannot listen there "
                f"({getattr(error, 'strerror', None) or error})"
                + ("; another program does, choose another port, or 0 for any that is free" if taken else "")
            ) from error

    @property
    def url(self) -> str:
        host = str(self.server_address[0])
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away in the middle of an answer is no error of this program; others are told."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def serve(
    paths: Sequence[str], host: str, port: int, limits: ReportLimits, say: Callable[[str], None]
) -> None:
    """Until Ctrl-C. Raises UserError as `write_report` does."""
    runs = open_runs(paths)
    with AnswerReader() as answers, ReportServer(host, port, sources(runs, limits, answers)) as server:
        say(f"{server.url} shows {len(runs)} run(s) and follows them; Ctrl-C ends it")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("ended")


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer
    timeout = _SLOWEST_S

    def do_GET(self) -> None:
        asked = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        if self.server.names is not None and asked not in self.server.names:
            self._answer(403, b"this server answers to its own name only", "text/plain")
            return
        path = unquote(urlsplit(self.path).path).lstrip("/")
        if path == "":
            self._answer(200, live_page(self.server.runs).encode(), "text/html; charset=utf-8")
        elif path == "manifest":
            self._manifest()
        else:
            self._piece(path)

    def _manifest(self) -> None:
        found = []
        for source in self.server.runs:
            try:
                with source.lock:
                    found.append(source.manifest())
            except OSError as error:
                said = f"{error.filename or source.run.path}: {error.strerror or error}"
                self._answer(500, said.encode("utf-8", "replace"), "text/plain; charset=utf-8")
                return
        body = packed({"live": True, "runs": found})
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
            # Gone since the manifest was made, or being written anew: the next manifest says what there is.
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
        """The terminal is for what matters."""
