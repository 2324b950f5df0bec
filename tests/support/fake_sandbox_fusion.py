"""A service with SandboxFusion's API: POST /run_code runs a file of Python in a new process.

Answers have the fields of the real service (bytedance/SandboxFusion, sandbox/server/sandbox_api.py).
"""

import json
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class SandboxFusion:
    """Requests that it was sent, and answers that it gives instead of running them, in order."""

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
                [sys.executable, str(file)],
                capture_output=True,
                timeout=request["run_timeout"],
                cwd=directory,
                stdin=subprocess.DEVNULL,
            )
            status, code, streams = "Finished", done.returncode, (done.stdout, done.stderr)
        except subprocess.TimeoutExpired as expired:
            status, code, streams = "TimeLimitExceeded", None, (expired.stdout or b"", expired.stderr or b"")
    output, errors = (stream.decode(errors="replace") for stream in streams)
    ran = {
        "status": status,
        "execution_time": time.monotonic() - begin,
        "return_code": code,
        "stdout": output,
        "stderr": errors,
    }
    outcome = "Success" if code == 0 else "Failed"
    return {"status": outcome, "message": "", "compile_result": None, "run_result": ran, "files": {}}
