"""JSON lines in parts: read again only where they have changed, and never all in memory at once."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from grpo_dist.runtime.json_files import check_regular

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """Some lines after each other. ``payload``: what they come to; None where it was let go to save room."""

    version: str
    weight: int
    payload: Any


@dataclass(frozen=True, slots=True)
class Encoded:
    payload: Any
    weight: int = 0  # what `LineFile.most` bounds


class LineFile:
    """A file of JSON objects, one a line, that may grow, shrink and be rewritten between two looks at it.

    Args:
        encode: the payload of some lines.
        per_part: lines of a part.
        most: weight of the payloads that are kept, the newest.
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
        self.torn = 0  # lines that are no JSON object
        self.left_out = 0  # parts whose payload is not kept

    def look(self) -> None:
        """Brings ``parts`` up to date. A file that is not there has none."""
        try:
            found = self._path.stat()
            check_regular(self._path)
            seen = (found.st_ino, found.st_size, found.st_mtime_ns)
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
                known = old[len(parts)] if len(parts) < len(old) else None
                if known is None or known.version != version or known.payload is None:
                    encoded = self._encode(lines)
                    known = Part(version, encoded.weight, encoded.payload)
                parts.append(known)
                kept += known.weight
                while self._most is not None and kept > self._most and first < len(parts) - 1:
                    kept -= parts[first].weight
                    parts[first] = replace(parts[first], payload=None)
                    first += 1
        self.parts, self.torn, self.left_out = parts, torn, first


def packed(value: Any) -> bytes:
    """``value`` as JSON, compressed. All text in it survives: lone surrogates and NULs are escapes."""
    return gzip.compress(json.dumps(value, separators=(",", ":"), allow_nan=False).encode(), 6, mtime=0)


def _parsed(raw: bytes) -> Line | None:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None
