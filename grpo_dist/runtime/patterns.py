"""Searches texts for a user's regular expression, in a process that is killed when a search hangs.

Python's matcher can hang, as ``(a+)+b`` does on a long run of a's, and no thread can interrupt it.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import threading
import time
from contextlib import suppress
from types import TracebackType

_START_S = 60.0  # limit for the first reply of the process, on a busy machine
_END_S = 10.0
# The alarm ends a search whose parent was killed.
_CHILD = """
import json, re, signal, sys
pattern, seconds, last = re.compile(json.loads(sys.argv[1])), int(sys.argv[2]), sys.argv[3] == "last"
print("ready", flush=True)
for line in sys.stdin:
    signal.alarm(seconds)
    found = None
    for match in pattern.finditer(json.loads(line)):
        if not last:
            found = [match.group(1)]
            break
        found = found if match.group(1) is None else [match.group(1)]
    signal.alarm(0)
    print(json.dumps(found), flush=True)
"""


class PatternTimeout(Exception):
    """A search exceeded its deadline."""


class PatternSearch:
    """Finds group 1 of ``pattern`` in one text after the other, also from several threads. Use as a context
    manager, or close it.

    Args:
        timeout_s: deadline of one search, seconds.
        last: take the last match whose group 1 took part, in place of the first match.
    """

    def __init__(self, pattern: str, *, timeout_s: float = 10.0, last: bool = False) -> None:
        self._pattern, self.timeout_s, self._last = pattern, timeout_s, last
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""

    def __enter__(self) -> PatternSearch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process. The next search starts another."""
        process, self._process, self._buffer = self._process, None, b""
        if process is not None:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def search(self, text: str) -> list[str | None] | None:
        """Return ``[group 1]`` of the match, None without a match.

        Raises PatternTimeout, or RuntimeError if the process died. Either ends the process.
        """
        with self._lock:
            try:
                return self._found(text)
            except (PatternTimeout, RuntimeError):
                self.close()
                raise

    def _found(self, text: str) -> list[str | None] | None:
        if self._process is None:
            self._start()
        assert self._process is not None and self._process.stdin is not None
        end = time.monotonic() + self.timeout_s
        # A long text exceeds the pipe, but the process reads all of it before it searches.
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(text).encode() + b"\n")
        found: list[str | None] | None = json.loads(self._line(end))
        return found

    def _start(self) -> None:
        alarm, which = str(int(self.timeout_s) + 5), "last" if self._last else "first"
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _CHILD, json.dumps(self._pattern), alarm, which],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        self._line(time.monotonic() + _START_S)

    def _line(self, end: float) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        output = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([output], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise PatternTimeout
            piece = self._process.stdout.read(1 << 16)
            if not piece:
                raise RuntimeError("the process that searches for a pattern died")
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line
