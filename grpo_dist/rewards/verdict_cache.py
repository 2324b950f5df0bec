"""Cache of judge verdicts, in a file across runs or in memory."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

from grpo_dist.errors import expanded

_BUSY_S = 60.0  # limit for waiting for another process that holds the file


class VerdictCache:
    """Verdicts by question. Several threads and processes of one machine may share a file.

    With ``path`` None the cache lives in memory. If the file fails later, e.g. because the disk is full, the
    cache continues in memory and calls ``note``.

    Raises:
        ValueError: the file cannot be used.
    """

    def __init__(self, path: str | None, *, note: Callable[[str], None] | None = None) -> None:
        self._path, self._note, self._lock = path, note, Lock()
        location = ":memory:" if path is None else str(expanded(path))
        try:
            if path is not None:
                Path(location).parent.mkdir(parents=True, exist_ok=True)
            self._file = _opened(location)
        except (OSError, sqlite3.Error) as error:
            raise ValueError(
                f"cache_path = {path}: cannot be used as a cache ({error}); name a file that does not exist "
                "yet, or one that a judge has written"
            ) from error

    def get(self, question: Any) -> bool | None:
        """Return the verdict on ``question``, a JSON value; None if there is none."""
        row = self._execute("SELECT equal FROM verdicts WHERE question = ?", _key(question))
        return None if row is None else bool(row[0])

    def put(self, question: Any, equal: bool) -> None:
        self._execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?)", _key(question), int(equal))

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def _execute(self, statement: str, *values: str | int) -> tuple[Any, ...] | None:
        """Return the first row of the result. A failing file never ends the run."""
        with self._lock:
            try:
                return self._file.execute(statement, values).fetchone()
            except sqlite3.Error as error:
                reason = f"the verdicts in {self._path} cannot be read or written ({error}); using memory"
                self._file = _opened(":memory:")  # the failed connection closes when it is collected
                row = self._file.execute(statement, values).fetchone()
        if self._note is not None:
            self._note(reason)
        return row


def _opened(location: str) -> sqlite3.Connection:
    file = sqlite3.connect(location, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    file.execute("CREATE TABLE IF NOT EXISTS verdicts (question TEXT PRIMARY KEY, equal INTEGER)")
    return file


def _key(question: Any) -> str:
    return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()
