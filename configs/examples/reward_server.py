"""A reward server: receives a group of completions at POST /score and replies {"scores": [...]}. It only
needs Python's standard library; any other language or framework works as well.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def score(group: dict) -> list[float | None]:
    """Return a score per completion, None if it cannot be scored: here 1 for short texts."""
    return [min(1.0, 200 / max(1, len(text))) for text in group["completions"]]


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        group = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        reply = json.dumps({"scores": score(group)}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: object) -> None:
        """Print no line per request."""


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8000
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    print(f"http://127.0.0.1:{server.server_port}/score", flush=True)
    server.serve_forever()
