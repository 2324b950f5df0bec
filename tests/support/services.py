"""Services outside the package: a judge's API, a sandbox's, the hub, and wandb's file."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

from tests.support.patience import wait_until

# Fake chat server with scripted statuses, delays and malformed replies.

# A reply: text, or (status, body, headers).
Reply = str | tuple[int, bytes, dict[str, str]]


class StandIn:
    """Replies to each chat with ``reply(request body, index of the request)`` and records the requests."""

    def __init__(self, reply: Callable[[dict[str, Any], int], Reply]) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.drip = 0  # bytes sent every 50 ms; 0 for all at once
        self.drip_headers = 0  # the same for the headers
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
    """Return a reply with any JSON."""
    return 200, json.dumps(value).encode(), {}


def failing(status: int, **headers: str) -> Reply:
    return status, b'{"error": {"message": "not now"}}', {k.replace("_", "-"): v for k, v in headers.items()}


def after(seconds: float, text: str) -> str:
    time.sleep(seconds)
    return text


# A service with SandboxFusion's API: POST /run_code runs a Python file in a new process. Answers have the
# fields of the real service (bytedance/SandboxFusion, sandbox/server/sandbox_api.py).


class SandboxFusion:
    """The received requests, and queued answers that replace running them, in order."""

    def __init__(self) -> None:
        self.requests: list[dict] = []
        self.answers: list[tuple[int, bytes]] = []
        self.url = ""


@contextmanager
def sandbox_fusion():
    """Serve on loopback. Yields the `SandboxFusion`."""
    service = SandboxFusion()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            service.requests.append(request)
            status, body = (
                service.answers.pop(0) if service.answers else (200, json.dumps(run_code(request)).encode())
            )
            if self.path != "/run_code":
                status, body = 404, b"not found"
            if not status:  # the connection breaks
                self.connection.close()
                return
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    service.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def run_code(request: dict) -> dict:
    assert request["language"] == "python"
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "main.py")
        file.write_text(request["code"])
        begin = time.monotonic()
        try:
            done = subprocess.run(
                [sys.executable, str(file)], capture_output=True, timeout=request["run_timeout"],
                cwd=directory, stdin=subprocess.DEVNULL,
            )  # fmt: skip
            status, code, streams = "Finished", done.returncode, (done.stdout, done.stderr)
        except subprocess.TimeoutExpired as expired:
            status, code, streams = "TimeLimitExceeded", None, (expired.stdout or b"", expired.stderr or b"")
    output, errors = (stream.decode(errors="replace") for stream in streams)
    ran = {
        "status": status, "execution_time": time.monotonic() - begin, "return_code": code, "stdout": output,
        "stderr": errors,
    }  # fmt: skip
    outcome = "Success" if code == 0 else "Failed"
    return {"status": outcome, "message": "", "compile_result": None, "run_result": ran, "files": {}}


# A local hub with one data set: the API of huggingface.co that `datasets` and `huggingface_hub` use.

COMMIT = "a" * 40


@contextmanager
def hub_with(name: str, files: Mapping[str, bytes]) -> Iterator[str]:
    """Serve the data set ``name`` inside the block; yield the address."""

    def described(path: str) -> dict[str, Any]:
        blob = sha1(files[path]).hexdigest()
        return {"type": "file", "path": path, "size": len(files[path]), "oid": blob}

    def is_folder(path: str) -> bool:
        return any(file.startswith(f"{path.rstrip('/')}/") for file in files)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Do not log."""

        def _send(self, body: bytes, status: int = 200, **headers: str) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def _json(self, value: Any) -> None:
            self._send(json.dumps(value).encode(), Content_Type="application/json")

        def do_POST(self) -> None:  # returns which of the paths exist
            body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
            paths = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body).get("paths", [])
            present = [described(path) for path in paths if path in files]
            folders = [{"type": "directory", "path": path, "oid": "x"} for path in paths if is_folder(path)]
            self._json(present + folders)

        def do_GET(self) -> None:
            path = unquote(urlparse(self.path).path)
            if path.startswith(f"/datasets/{name}/resolve/"):
                file = path.partition("/resolve/")[2].partition("/")[2]
                if file in files:
                    blob = f'"{sha1(files[file]).hexdigest()}"'
                    self._send(files[file], X_Repo_Commit=COMMIT, ETag=blob)
                else:
                    self._send(b"", 404, X_Error_Code="EntryNotFound")
            elif path.startswith(f"/api/datasets/{name}/tree/"):
                folder = path.partition("/tree/")[2].partition("/")[2]
                start = f"{folder}/" if folder else ""
                inside = [file.removeprefix(start) for file in files if file.startswith(start)]
                folders = {file.partition("/")[0] for file in inside if "/" in file}
                if "recursive=true" not in self.path.lower():
                    inside = [file for file in inside if "/" not in file]
                listed = [described(start + file) for file in inside]
                self._json(
                    listed + [{"type": "directory", "path": start + one, "oid": "x"} for one in folders]
                )
            elif path.startswith(f"/api/datasets/{name}"):
                siblings = [{"rfilename": file} for file in files]
                self._json({"id": name, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []})
            else:
                self._send(b"", 404)

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


# A reader of wandb's offline files: a header, then records in blocks of 32 KiB, as in LevelDB's log.

_BLOCK, _HEADER = 32768, 7
_FULL, _FIRST, _LAST = 1, 2, 4


def records(path: Path) -> list[Any]:
    """Return the completely written protocol buffers of one `.wandb` file."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts, complete = path.read_bytes(), 7, b"", []
    while at + _HEADER <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:  # the rest of a block is empty
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + _HEADER])
        if at + _HEADER + length > len(data):
            break
        part, at = data[at + _HEADER : at + _HEADER + length], at + _HEADER + length
        parts = part if kind in (_FULL, _FIRST) else parts + part
        if kind in (_FULL, _LAST):
            complete.append(Record.FromString(parts))
    return complete


def offline_run(directory: Path) -> list[Any]:
    """Return the records of the run in ``directory``; its writer process may lag."""
    (path,) = directory.glob("offline-run-*/*.wandb")

    def is_whole() -> bool:
        return bool(written := records(path)) and written[-1].WhichOneof("record_type") == "exit"

    wait_until(is_whole, f"{path}: no end")
    return records(path)


def history(written: list[Any]) -> list[dict[str, Any]]:
    """Return the logged values, one mapping per step."""
    rows = [r.history.item for r in written if r.WhichOneof("record_type") == "history"]
    return [{i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items} for items in rows]


def config(written: list[Any]) -> dict[str, Any]:
    """Return the top-level keys of the configuration."""
    runs = [r.run for r in written if r.WhichOneof("record_type") == "run"]
    return {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in runs[0].config.update}
