"""Columns of many rows, texts and token ids end to end in one array each, and their store.

What took long to read or to tokenise is stored in `GRPO_DIST_CACHE/rows`, under a name that is a hash of all
that decides it. The next start maps it into memory.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import numpy as np

from grpo_dist.runtime.files import publish
from grpo_dist.runtime.hardware import available_cpus
from grpo_dist.runtime.model_files import cache_dir

T = TypeVar("T")
Self = TypeVar("Self", bound="Slices[Any]")

STORED_FROM = 10_000  # rows of a source; reading fewer takes no longer than a look at what is stored
_KEPT_DAYS = 30  # since a stored file was last read
_KEPT_BYTES = 20 * 2**30  # of all stored files, those read last
_PART = 4096  # values encoded, or hashed, at once
_DIGEST_BYTES = 16
_BLOCK_BYTES = 2**23  # hashed at once
_ALIGNED = 64  # bytes, where an array begins in a stored file


class Computed(Sequence[T], Generic[T]):
    """A sequence whose values are put together when they are asked for; a slice is a list. A subclass writes
    `__len__` and `_at`.
    """

    @overload
    def __getitem__(self, place: int) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> list[T]: ...
    def __getitem__(self, place: int | slice) -> T | list[T]:
        if isinstance(place, slice):
            return self._list(place)
        return self._at(range(len(self))[place])

    def __iter__(self) -> Iterator[T]:
        return map(self._at, range(len(self)))

    def _at(self, place: int) -> T:
        """Return the value at ``place``, counted from 0."""
        raise NotImplementedError

    def _list(self, places: slice) -> list[T]:
        return [self._at(place) for place in range(*places.indices(len(self)))]


class Slices(Computed[T]):
    """Values of different lengths in one array: number i is ``values[begins[i]:ends[i]]``."""

    def __init__(self, values: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> None:
        self.values, self.begins, self.ends = values, begins, ends

    @classmethod
    def from_ends(cls: type[Self], values: np.ndarray, ends: np.ndarray) -> Self:
        """Return slices of ``values`` without gaps; ``ends``: int64, of each."""
        return cls(values, np.concatenate([np.zeros(1, np.int64), ends[:-1]])[: len(ends)], ends)

    @classmethod
    def join(cls: type[Self], parts: Sequence[Self]) -> Self:
        """Return the values of all ``parts`` in order."""
        offsets = np.cumsum([0, *(len(part.values) for part in parts)])
        return cls(
            np.concatenate([part.values for part in parts]),
            np.concatenate([part.begins + n for part, n in zip(parts, offsets, strict=False)]),
            np.concatenate([part.ends + n for part, n in zip(parts, offsets, strict=False)]),
        )

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[T]:
        for begin in range(0, len(self), _PART):
            yield from self[begin : begin + _PART]

    @property
    def lengths(self) -> np.ndarray:
        """Return the length of each in ``values``, int64."""
        return self.ends - self.begins

    def select(self: Self, numbers: np.ndarray) -> Self:
        return type(self)(self.values, self.begins[numbers], self.ends[numbers])

    def packed(self) -> tuple[np.ndarray, np.ndarray]:
        """Return ``values`` and ``ends`` without gaps, as `from_ends` takes them."""
        ends = np.cumsum(self.lengths)
        if np.array_equal(ends, self.ends):
            return self.values[: ends[-1] if len(ends) else 0], ends
        parts = [self.values[a:b] for a, b in self._bounds(slice(None))]
        return np.concatenate([self.values[:0], *parts]), ends

    def _at(self, place: int) -> T:
        return self._read(int(self.begins[place]), int(self.ends[place]))

    def _list(self, places: slice) -> list[T]:
        return [self._read(begin, end) for begin, end in self._bounds(places)]

    def _bounds(self, numbers: slice) -> Iterable[tuple[int, int]]:
        return zip(self.begins[numbers].tolist(), self.ends[numbers].tolist(), strict=True)

    def _read(self, begin: int, end: int) -> T:
        raise NotImplementedError


class TokenIds(Slices[np.ndarray]):
    """Token ids; ``values``: int32."""

    def _read(self, begin: int, end: int) -> np.ndarray:
        return self.values[begin:end]


class Texts(Slices[str]):
    """Texts; ``values``: uint8, UTF-8 in which a lone surrogate is encoded like any other character."""

    def __init__(self, values: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> None:
        super().__init__(values, begins, ends)
        self._bytes = values.data

    def _read(self, begin: int, end: int) -> str:
        return str(self._bytes[begin:end], "utf-8", "surrogatepass")

    def _list(self, places: slice) -> list[str]:
        content = self._bytes
        return [str(content[begin:end], "utf-8", "surrogatepass") for begin, end in self._bounds(places)]


class Column:
    """Collects the bytes of values end to end. Memory of what is collected is not copied at the end."""

    def __init__(self) -> None:
        self._data, self._ends, self._size = bytearray(), array("q"), 0
        self._waiting: list[bytes] = []

    def append(self, value: bytes) -> None:
        self._size += len(value)
        self._ends.append(self._size)
        self._waiting.append(value)
        if len(self._waiting) == _PART:
            self._flush()

    def extend(self, values: Sequence[bytes]) -> None:
        self.extend_packed(b"".join(values), np.cumsum(list(map(len, values)), dtype=np.int64))

    def extend_packed(self, values: bytes | memoryview, ends: np.ndarray) -> None:
        """Append ``values``, which stand end to end; ``ends``: int64, of each, in bytes."""
        self._flush()
        self._ends.frombytes((ends + self._size).tobytes())
        self._data += values
        self._size = len(self._data)

    def append_text(self, text: str) -> None:
        self.append(text.encode("utf-8", "surrogatepass"))

    def texts(self) -> Texts:
        return Texts.from_ends(*self._arrays(np.uint8))

    def token_ids(self) -> TokenIds:
        values, ends = self._arrays(np.int32)
        return TokenIds.from_ends(values, ends // values.itemsize)

    def _arrays(self, dtype: type) -> tuple[np.ndarray, np.ndarray]:
        self._flush()
        return np.frombuffer(self._data, dtype), np.array(self._ends, np.int64)

    def _flush(self) -> None:
        self._data += b"".join(self._waiting)
        self._waiting.clear()


def digest_parts(parts: Iterable[bytes]) -> str:
    """Return the first 16 digits of the SHA-256 of ``parts``, one behind another."""
    digest, rest = hashlib.sha256(), iter(parts)
    while some := list(islice(rest, _PART)):
        digest.update(b"".join(some))
    return digest.hexdigest()[:16]


def hex_texts(values: np.ndarray) -> Iterator[str]:
    """Yield the 16 hexadecimal digits of each of ``values``, uint64."""
    digits = values.astype(">u8").tobytes().hex()
    return (digits[begin : begin + 16] for begin in range(0, len(digits), 16))


# Storage


@cache
def _code_digest() -> str:
    """Return a hash of the code that reads and tokenises rows, and of what it says of their answers."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    folders = ("chat", "config", "data", "rewards", "runs")
    for file in sorted(file for folder in folders for file in (root / folder).glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def store_key(decides: Any) -> str:
    """Return the name of what ``decides`` and this code determine."""
    decided = json.dumps([decides, _code_digest()], sort_keys=True, default=str)
    return hashlib.sha256(decided.encode()).hexdigest()[:32]


def files_state(files: Sequence[Path]) -> list[tuple[int, int]]:
    """Return size and time of change of each file."""
    return [(stat.st_size, stat.st_mtime_ns) for stat in map(os.stat, files)]


def files_digest(files: Sequence[Path]) -> list[str]:
    """Return a hash of the content of each file."""
    return [_digest(file).hex() for file in files]


def load(key: str) -> tuple[dict[str, np.ndarray], Any] | None:
    """Return the arrays, mapped into memory, and the JSON stored under ``key``; None where there are none, or
    damaged ones: the file begins with a hash of the rest.
    """
    place = _place(key)
    try:
        with place.open("rb") as opened:
            if opened.read(_DIGEST_BYTES) != _digest(place, _DIGEST_BYTES):
                return None
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError:
        return None
    with suppress(OSError):  # of another user; who may not write there deletes nothing, either
        os.utime(place)  # `_prune` deletes what is not read
    head = _DIGEST_BYTES + 8
    begin = head + int.from_bytes(mapped[_DIGEST_BYTES:head], "little")
    tables, value = json.loads(mapped[head:begin])
    arrays = {
        name: np.frombuffer(mapped, dtype, size, _aligned(begin) + offset) if size else np.empty(0, dtype)
        for name, dtype, size, offset in tables
    }
    return arrays, value


def save(key: str, arrays: Mapping[str, np.ndarray], value: Any) -> None:
    """Store ``arrays``, of one dimension, and what JSON holds of ``value`` under ``key``. Where the cache
    cannot be written the next start takes as long as this one.
    """
    place = _place(key)
    unfinished = place.with_name(f".{place.name}-{os.getpid()}")
    tables, offset = [], 0
    for name, values in arrays.items():
        tables.append((name, values.dtype.str, len(values), offset))
        offset = _aligned(offset + values.nbytes)
    head = json.dumps([tables, value]).encode()
    begin = _aligned(_DIGEST_BYTES + 8 + len(head))
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("w+b") as opened:
            opened.write(bytes(_DIGEST_BYTES) + len(head).to_bytes(8, "little") + head)
            for (_, _, _, offset), values in zip(tables, arrays.values(), strict=True):
                opened.seek(begin + offset)
                opened.write(np.ascontiguousarray(values).data)
            opened.flush()
            opened.seek(0)
            opened.write(_digest(unfinished, _DIGEST_BYTES))
        publish(unfinished, place)
        _prune(place.parent)
    except OSError:
        if unfinished.exists():
            unfinished.unlink()


def _prune(folder: Path) -> None:
    """Delete stored files that no start has read for long, and the oldest of too many."""
    files = sorted(
        ((stat.st_mtime, stat.st_size, file) for file in folder.iterdir() if (stat := file.stat())),
        reverse=True,
    )
    oldest, total = time.time() - _KEPT_DAYS * 86_400, 0
    for read_last, size, file in files:
        total += size
        if read_last < oldest or total > max(_KEPT_BYTES, files[0][1]):
            file.unlink(missing_ok=True)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNED) * _ALIGNED


def _digest(file: Path, begin: int = 0) -> bytes:
    """Return a hash of ``file`` from ``begin`` on: of the hashes of its blocks, which threads compute."""

    def digest_block(at: int) -> bytes:
        with file.open("rb") as opened:
            opened.seek(at)
            return hashlib.sha256(opened.read(_BLOCK_BYTES)).digest()

    places = range(begin, file.stat().st_size, _BLOCK_BYTES)
    with ThreadPoolExecutor(max(1, min(len(places), available_cpus()))) as threads:
        digests = b"".join(threads.map(digest_block, places))
    return hashlib.sha256(digests).digest()[:_DIGEST_BYTES]


def _place(key: str) -> Path:
    return cache_dir() / "rows" / f"{key}.columns"
