"""JSON lines in parts: only changed parts are encoded again, and never all lines are in memory."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from grpo_dist.runtime.files import check_regular

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Encoded:
    """The encoding of some lines.

    Attributes:
        weight: counts towards `most` of `LineFile`.
        light: replaces ``payload`` where a file exceeds its `most`; costs little memory.
    """

    payload: Any
    weight: int = 0
    light: Any = None


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive lines, whose ``version`` changes with them."""

    version: str
    encoded: Encoded
    dropped: bool = False

    @property
    def payload(self) -> Any:
        """Their encoding; the light one if the other was ``dropped``."""
        return self.encoded.payload


class LineFile:
    """A file of JSON objects, one per line, that may grow, shrink or be rewritten between two reads.

    Args:
        encode: returns the payload of some lines.
        per_part: lines of a part.
        most: total weight of the payloads to keep, newest first; the newest part stays in any case.
    """

    def __init__(
        self,
        path: Path,
        encode: Callable[[list[Line]], Encoded],
        *,
        per_part: int = 200,
        most: int | None = None,
    ) -> None:
        self._path, self._encode, self._per_part, self._most = path, encode, per_part, most
        self._seen: tuple[int, int, int] | None = None
        self.parts: list[Part] = []
        self.torn = 0  # lines that are not JSON objects
        self.left_out = 0  # parts with only the light payload

    def look(self) -> None:
        """Update ``parts``. A missing file has none."""
        try:
            status = self._path.stat()
            check_regular(self._path)
            seen = (status.st_ino, status.st_size, status.st_mtime_ns)
            if seen != self._seen:
                self._read()
                self._seen = seen
        except FileNotFoundError:
            self._seen, self.parts, self.torn, self.left_out = None, [], 0, 0

    def _read(self) -> None:
        old, torn, kept, first = self.parts, 0, 0, 0
        parts: list[Part] = []
        with self._path.open("rb") as file:
            while raw := list(islice(file, self._per_part)):
                version = f"{zlib.crc32(b''.join(raw)):08x}-{len(raw)}"
                lines = [line for line in map(_parsed, raw) if line is not None]
                torn += len(raw) - len(lines)
                part = old[len(parts)] if len(parts) < len(old) else None
                if part is None or part.version != version or part.dropped:
                    part = Part(version, self._encode(lines))
                parts.append(part)
                kept += part.encoded.weight
                while self._most is not None and kept > self._most and first < len(parts) - 1:
                    oldest = parts[first].encoded
                    kept -= oldest.weight
                    parts[first] = Part(parts[first].version, Encoded(oldest.light), dropped=True)
                    first += 1
        self.parts, self.torn, self.left_out = parts, torn, first


def packed(value: Any) -> bytes:
    """Compress ``value`` as JSON. All text survives: lone surrogates and NULs are escaped."""
    return gzip.compress(json.dumps(value, separators=(",", ":"), allow_nan=False).encode(), 6, mtime=0)


def _parsed(raw: bytes) -> Line | None:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None
