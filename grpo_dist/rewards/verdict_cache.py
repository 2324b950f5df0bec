"""Verdicts of a judge, kept in a file across runs, or in memory for one."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

_BUSY_S = 60.0  # longest another process may hold the file


class VerdictCache:
    """Yes or no by question; several threads and processes of one machine may share a file.

    ``path`` None: in memory, gone with the process. Raises ValueError for a file that cannot be used. One
    that fails later, as when its disk is full, is left for memory, and ``note`` is told so.
    """

    def __init__(self, path: str | None, *, note: Callable[[str], None] | None = None) -> None:
        self._path, self._note, self._lock = path, note, Lock()
        location = ":memory:" if path is None else str(Path(path).expanduser())
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
        """What was decided about ``question``, a JSON value; None: nothing yet."""
        row = self._execute("SELECT equal FROM verdicts WHERE question = ?", _key(question))
        return None if row is None else bool(row[0])

    def put(self, question: Any, equal: bool) -> None:
        self._execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?)", _key(question), int(equal))

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def _execute(self, statement: str, *values: str | int) -> tuple[Any, ...] | None:
        """The first row of the result. A verdict is worth more than its record, so a file that fails ends
        nothing.
        """
        with self._lock:
            try:
                return self._file.execute(statement, values).fetchone()
            except sqlite3.Error as error:
                reason = f"the verdicts in {self._path} cannot be read or written ({error}), memory has to do"
                self._file = _opened(":memory:")  # the failed one is closed when it is collected
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
