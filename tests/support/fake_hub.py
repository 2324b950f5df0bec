"""A hub with one data set on this machine: what `datasets` and `huggingface_hub` ask of huggingface.co."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

COMMIT = "a" * 40


@contextmanager
def hub_with(name: str, files: Mapping[str, bytes]) -> Iterator[str]:
    """Serve the data set ``name`` inside the block; its address."""

    def described(path: str) -> dict[str, Any]:
        blob = sha1(files[path]).hexdigest()
        return {"type": "file", "path": path, "size": len(files[path]), "oid": blob}

    def is_folder(path: str) -> bool:
        return any(file.startswith(f"{path.rstrip('/')}/") for file in files)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Say nothing."""

        def _send(self, body: bytes, status: int = 200, **headers: str) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def _json(self, value: Any) -> None:
            self._send(json.dumps(value).encode(), Content_Type="application/json")

        def do_POST(self) -> None:  # which of some paths are files
            body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
            paths = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body).get("paths", [])
            known = [described(path) for path in paths if path in files]
            folders = [{"type": "directory", "path": path, "oid": "x"} for path in paths if is_folder(path)]
            self._json(known + folders)

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
