"""Columns of many rows: texts and token ids, packed into one array each, and their cache on disk.

Equal rows are stored once: DAPO-Math-17k's file has each of its 17,000 problems about 100 times. Reading,
rendering, tokenising and checks run once per distinct row; a row object is built on access.

Large sources are cached in `GRPO_DIST_CACHE/rows`, under a hash of all their inputs. The next start maps them
into memory.
"""

from __future__ import annotations

import hashlib
import json
import marshal
import mmap
import os
import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import accumulate, chain, islice
from operator import attrgetter
from pathlib import Path
from typing import Any, Generic, Self, TypeVar, overload

import numpy as np

from grpo_dist.runtime.files import publish
from grpo_dist.runtime.hardware import available_cpus
from grpo_dist.runtime.model_files import cache_dir
from grpo_dist.types import Prompt

T = TypeVar("T")
V = TypeVar("V")

STORED_FROM = 10_000  # rows of a source; reading fewer is as fast as loading them from the cache
_KEPT_DAYS = 30  # since a stored file was last read
_KEPT_BYTES = 20 * 2**30  # total size of stored files; the least recently read are deleted first
_PART = 4096  # values encoded, or hashed, at once
_DIGEST_BYTES = 16
_BLOCK_BYTES = 2**23  # hashed at once
_ALIGNED = 64  # alignment of arrays in a stored file, bytes
REMEMBERED = 2**18  # distinct rows remembered to find repeats


class Computed(Sequence[T], Generic[T]):
    """A sequence that builds its values on access; a slice is a list. A subclass defines `__len__` and
    `_get`.
    """

    @overload
    def __getitem__(self, place: int) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> list[T]: ...
    def __getitem__(self, place: int | slice) -> T | list[T]:
        if isinstance(place, slice):
            return self._list(place)
        return self._get(range(len(self))[place])

    def __iter__(self) -> Iterator[T]:
        return map(self._get, range(len(self)))

    def _get(self, place: int) -> T:
        """Return the value at ``place``, counted from 0."""
        raise NotImplementedError

    def _list(self, places: slice) -> list[T]:
        return [self._get(place) for place in range(*places.indices(len(self)))]


class Slices(Computed[T]):
    """Values of different lengths in one array: number i is ``values[begins[i]:ends[i]]``."""

    def __init__(self, values: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> None:
        self.values, self.begins, self.ends = values, begins, ends

    @classmethod
    def from_ends(cls, values: np.ndarray, ends: np.ndarray) -> Self:
        """Return slices of ``values`` without gaps; ``ends``: end of each, int64."""
        return cls(values, np.concatenate([np.zeros(1, np.int64), ends[:-1]])[: len(ends)], ends)

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
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
        """Return the length of each slice, int64."""
        return self.ends - self.begins

    def select(self, numbers: np.ndarray) -> Self:
        return type(self)(self.values, self.begins[numbers], self.ends[numbers])

    def packed(self) -> tuple[np.ndarray, np.ndarray]:
        """Return ``values`` and ``ends`` without gaps, as `from_ends` takes them."""
        ends = np.cumsum(self.lengths)
        if np.array_equal(ends, self.ends):
            return self.values[: ends[-1] if len(ends) else 0], ends
        parts = [self.values[a:b] for a, b in self._bounds(slice(None))]
        return np.concatenate([self.values[:0], *parts]), ends

    def _get(self, place: int) -> T:
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
    """Texts; ``values``: uint8, UTF-8 that also encodes lone surrogates."""

    def __init__(self, values: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> None:
        super().__init__(values, begins, ends)
        self._bytes = values.data

    def _read(self, begin: int, end: int) -> str:
        return str(self._bytes[begin:end], "utf-8", "surrogatepass")

    def _list(self, places: slice) -> list[str]:
        content = self._bytes
        return [str(content[begin:end], "utf-8", "surrogatepass") for begin, end in self._bounds(places)]


class Column:
    """Collects the bytes of values in one buffer, which the resulting arrays share."""

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
        """Append packed ``values``; ``ends``: end of each in bytes, int64."""
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
    """Return the first 16 digits of the SHA-256 of the concatenated ``parts``."""
    digest, rest = hashlib.sha256(), iter(parts)
    while some := list(islice(rest, _PART)):
        digest.update(b"".join(some))
    return digest.hexdigest()[:16]


def hex_texts(values: np.ndarray) -> Iterator[str]:
    """Yield the 16 hexadecimal digits of each of ``values``, uint64."""
    digits = values.astype(">u8").tobytes().hex()
    return (digits[begin : begin + 16] for begin in range(0, len(digits), 16))


# What repeats


class Repeated(Computed[T]):
    """A sequence of ``distinct`` values, some of which occur at several places.

    ``codes``: int32 [n], index of the distinct value at each place; None: each value once, in order.
    """

    def __init__(self, distinct: Sequence[T], codes: np.ndarray | None = None) -> None:
        self.distinct = distinct
        self.codes: np.ndarray = np.arange(len(distinct), dtype=np.int32) if codes is None else codes

    @classmethod
    def join(cls, parts: Sequence[Repeated[T]]) -> Repeated[T]:
        """Return the values of all ``parts`` in order."""
        codes, count = [np.empty(0, np.int32)], 0
        for part in parts:
            codes.append(part.codes + np.int32(count))
            count += len(part.distinct)
        return Repeated(Chained([part.distinct for part in parts]), np.concatenate(codes))

    def select(self, numbers: np.ndarray) -> Repeated[T]:
        """Return the values at these places, with the same distinct values."""
        return Repeated(self.distinct, self.codes[numbers])

    def __len__(self) -> int:
        return len(self.codes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def _get(self, place: int) -> T:
        return self.distinct[self.codes[place]]

    @property
    def is_distinct(self) -> bool:
        """Whether each distinct value occurs once, in order."""
        return len(self.distinct) == len(self.codes) and bool((self.codes[:-1] < self.codes[1:]).all())

    def counts(self) -> np.ndarray:
        """Return how often each distinct value occurs, int64 [distinct]."""
        return np.bincount(self.codes, minlength=len(self.distinct))

    def first_places(self) -> np.ndarray:
        """Return the first place of each distinct value, int64 [distinct]."""
        return np.unique(self.codes, return_index=True)[1]

    def where(self, is_wanted: Callable[[T], bool]) -> np.ndarray:
        """Return the places of the wanted values, int64; calls ``is_wanted`` once per distinct value."""
        return self._where(map(is_wanted, self.distinct))

    def places(self, name: str, is_wanted: Callable[[Any], bool]) -> np.ndarray:
        """Return the places of the values whose attribute ``name`` is wanted, as `where`."""
        return self._where(map(is_wanted, column(self.distinct, name)))

    def _where(self, is_match: Iterable[bool]) -> np.ndarray:
        return np.flatnonzero(np.fromiter(is_match, bool, len(self.distinct))[self.codes])


class Chained(Computed[T]):
    """Concatenated sequences."""

    def __init__(self, parts: Sequence[Sequence[T]]) -> None:
        self._parts, self._ends = parts, list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self._parts)

    def _get(self, place: int) -> T:
        part = bisect_right(self._ends, place)
        return self._parts[part][place - (self._ends[part - 1] if part else 0)]

    def column(self, name: str) -> Iterable[Any]:
        return chain.from_iterable(column(part, name) for part in self._parts)


@dataclass(eq=False)
class Table:
    """Columns of the same length: arrays, `Slices`, and names as `Repeated`. A subclass is a dataclass with
    columns as fields; its other fields belong to the whole table.
    """

    def _columns(self) -> Iterator[tuple[str, np.ndarray | Slices[Any] | Repeated[Any]]]:
        for column_field in fields(self):
            if isinstance(values := getattr(self, column_field.name), np.ndarray | Slices | Repeated):
                yield column_field.name, values

    def select(self, numbers: np.ndarray) -> Self:
        """Return the rows with these numbers."""
        chosen = {
            name: values[numbers] if isinstance(values, np.ndarray) else values.select(numbers)
            for name, values in self._columns()
        }
        return replace(self, **chosen)

    def join(self, *others: Self) -> Self:
        """Return the rows of this table and of ``others``, in order."""
        joined = {
            name: np.concatenate(parts) if isinstance(values, np.ndarray) else type(values).join(parts)
            for name, values in self._columns()
            for parts in [[values, *(getattr(other, name) for other in others)]]
        }
        return replace(self, **joined) if others else self

    def stored(self) -> tuple[dict[str, np.ndarray], dict[str, list[Any]]]:
        """Return arrays and names, the arguments of `from_store`."""
        arrays, names = {}, {}
        for name, values in self._columns():
            if isinstance(values, Slices):
                arrays[name], arrays[f"{name}_ends"] = values.packed()
            elif isinstance(values, Repeated):
                arrays[name], names[name] = values.codes, list(values.distinct)
            else:
                arrays[name] = values
        return arrays, names

    @classmethod
    def from_store(
        cls, arrays: Mapping[str, np.ndarray], names: Mapping[str, Sequence[Any]], **further: Any
    ) -> Self:
        """Build the table from `stored`. ``further``: fields that are no columns."""
        for name in [column_field.name for column_field in fields(cls)]:
            if name not in arrays:
                continue
            values = further[name] = arrays[name]
            if f"{name}_ends" in arrays:
                kind = Texts if values.dtype == np.uint8 else TokenIds
                further[name] = kind.from_ends(values, arrays[f"{name}_ends"])
            elif name in names:
                further[name] = Repeated(names[name], values)
        return cls(**further)


class Prompts(Repeated[Prompt]):
    """Prompts with distinct uids, several of which may share a row.

    ``numbers``: int32 [n], how often the uid of each has occurred so far: "set-1f", "set-1f-2", ...
    ``key``: cache key of the prompts, see `columns.store_key`; "": unknown.
    """

    def __init__(
        self,
        distinct: Sequence[Prompt],
        codes: np.ndarray | None = None,
        numbers: np.ndarray | None = None,
        key: str = "",
    ) -> None:
        super().__init__(distinct, codes)
        self.numbers = np.ones(len(self), np.int32) if numbers is None else numbers
        self.key = key

    @classmethod
    def join(cls, parts: Iterable[Sequence[Prompt]]) -> Prompts:
        """Return the prompts of all ``parts`` in order."""
        joined = [
            part if isinstance(part, Prompts) else cls(part, key=getattr(part, "key", ""))
            for part in parts
            if len(part)
        ]
        if len(joined) == 1:
            return joined[0]
        together, keys = Repeated.join(joined), [part.key for part in joined]
        return cls(
            together.distinct,
            together.codes,
            np.concatenate([np.empty(0, np.int32), *(part.numbers for part in joined)]),
            store_key(["joined", keys]) if all(keys) else "",
        )

    def _get(self, place: int) -> Prompt:
        prompt, number = self.distinct[self.codes[place]], self.numbers[place]
        return prompt if number == 1 else replace(prompt, uid=f"{prompt.uid}-{number}")

    def digest(self, name: str, parts: Callable[[], Iterable[bytes]], *, with_uids: bool) -> str:
        """Return the first 16 digits of the SHA-256 of the prompts' concatenated parts; ``with_uids`` puts a
        prompt's uid before its part. The digest is stored if the prompts have a key.

        ``parts``: returns the part of each distinct prompt; ``name``: what the part is.
        """
        key = self.key and store_key(["digest", name, self.key])
        if key and (stored := load(key)) is not None:
            return str(stored[1])
        all_parts = parts() if self.is_distinct else each_place(parts(), self.codes)
        if with_uids:
            all_parts = chain.from_iterable(
                (uid.encode(), part) for uid, part in zip(self.uids(), all_parts, strict=True)
            )
        digest = digest_parts(all_parts)
        if key:
            save(key, {}, digest)
        return digest

    def uids(self) -> Iterator[str]:
        if self.is_distinct and (self.numbers == 1).all():
            yield from column(self.distinct, "uid")
            return
        names = list(column(self.distinct, "uid"))
        for at, number in zip(self.codes.tolist(), self.numbers.tolist(), strict=True):
            yield names[at] if number == 1 else f"{names[at]}-{number}"


class ByUid(Mapping[str, Prompt]):
    """``prompts`` by uid; only their places are in memory."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts
        self._places: dict[str, int] | None = None

    @property
    def places(self) -> dict[str, int]:
        if self._places is None:
            self._places = {uid: place for place, uid in enumerate(uids_of(self._prompts))}
        return self._places

    def __getitem__(self, uid: str) -> Prompt:
        return self._prompts[self.places[uid]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self._prompts)


def distinct_of(values: Sequence[T]) -> Sequence[T]:
    """Return the distinct values of a `Repeated`, in the order of their first places; else ``values``."""
    return values.distinct if isinstance(values, Repeated) else values


def column(values: Sequence[Any], name: str) -> Iterable[Any]:
    """Return the attribute ``name`` of each of ``values``; columns are read without building the values."""
    return values.column(name) if hasattr(values, "column") else map(attrgetter(name), values)


def sources_of(prompts: Sequence[Prompt]) -> list[str]:
    """Return the source of each prompt."""
    values = Prompts.join([prompts])
    return list(each_place(column(values.distinct, "source"), values.codes))


def uids_of(prompts: Sequence[Prompt]) -> list[str]:
    """Return the uid of each prompt."""
    return list(prompts.uids()) if isinstance(prompts, Prompts) else [prompt.uid for prompt in prompts]


def each(values: Sequence[T], read: Callable[[T], V]) -> list[V]:
    """Return ``read(value)`` for each value. ``read`` is called once per distinct value, so it must use no
    uid and no location.
    """
    if not isinstance(values, Repeated):
        return [read(value) for value in values]
    return list(each_place(map(read, values.distinct), values.codes))


def each_place(distinct: Iterable[V], codes: np.ndarray) -> Iterator[V]:
    """Yield ``distinct[code]`` for each of ``codes``."""
    return map(list(distinct).__getitem__, codes.tolist())


class Numbers:
    """Numbers distinct rows by hash; remembers the first `REMEMBERED` hashes to find repeats.

    ``codes``: int32, number of each row. ``count``: how many numbers are used.
    """

    def __init__(self) -> None:
        self.codes, self.count = array("i"), 0
        self._numbers: dict[int | bytes, int] = {}

    @property
    def finds_repeats(self) -> bool:
        """Whether to hash further rows: memory is not full, or many rows were repeats."""
        remembered = len(self._numbers)
        return remembered < REMEMBERED or len(self.codes) > 2 * remembered

    def add(self, row_hash: int | bytes | None) -> bool:
        """Number a row, and return whether it is new. None: the row is not compared."""
        number = None if row_hash is None else self._numbers.get(row_hash)
        self.codes.append(self.count if number is None else number)
        if number is not None:
            return False
        if row_hash is not None and len(self._numbers) < REMEMBERED:
            self._numbers[row_hash] = self.count
        self.count += 1
        return True

    def extend(self, hashes: np.ndarray) -> list[int]:
        """Number rows with these ``hashes``, uint64, and return the places of the new ones among them."""
        return [place for place, row_hash in enumerate(hashes.tolist()) if self.add(row_hash)]


def record_hash(record: Any) -> bytes | None:
    """Return a hash that only an equal record has, with values of the same types; None for values that
    are not JSON. The hash is short, since a record may be long and many are remembered.
    """
    try:
        dumped = marshal.dumps(record, 2)  # later versions depend on reference counts
    except ValueError:
        return None
    return hashlib.blake2b(dumped, digest_size=16).digest()


def sorted_distinct(values: np.ndarray) -> np.ndarray:
    """Return the distinct ``values`` in order: `numpy.unique` takes four times as long."""
    ordered = np.sort(values)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]]


def occurrences(codes: np.ndarray) -> np.ndarray:
    """Return how often each of ``codes`` has occurred so far, itself included, int32 [n].

    [0, 1, 0, 0] -> [1, 1, 2, 3]
    """
    order = np.argsort(codes, kind="stable")
    ordered = codes[order]
    starts = np.searchsorted(ordered, ordered)  # the first place of the same code
    numbers = np.empty(len(codes), np.int32)
    numbers[order] = np.arange(len(codes)) - starts + 1
    return numbers


# Storage


@cache
def _code_digest() -> str:
    """Return a hash of the code that reads and tokenises rows and checks their answers."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    folders = ("chat", "config", "data", "rewards", "runs")
    for file in sorted(file for folder in folders for file in (root / folder).glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def store_key(decides: Any) -> str:
    """Return the cache key of data that ``decides`` and this code determine."""
    decided = json.dumps([decides, _code_digest()], sort_keys=True, default=str)
    return hashlib.sha256(decided.encode()).hexdigest()[:32]


def files_state(files: Sequence[Path]) -> list[tuple[int, int]]:
    """Return size and modification time of each file."""
    return [(stat.st_size, stat.st_mtime_ns) for stat in map(os.stat, files)]


def files_digest(files: Sequence[Path]) -> list[str]:
    """Return a hash of the content of each file."""
    return [_digest(file).hex() for file in files]


def load(key: str) -> tuple[dict[str, np.ndarray], Any] | None:
    """Return the arrays, mapped into memory, and the JSON stored under ``key``; None where the file is
    missing or damaged: it begins with a hash of the rest.
    """
    place = _place(key)
    try:
        with place.open("rb") as opened:
            if opened.read(_DIGEST_BYTES) != _digest(place, _DIGEST_BYTES):
                return None
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError:
        return None
    with suppress(OSError):  # another user's file, which `_prune` cannot delete either
        os.utime(place)  # marks the file as read for `_prune`
    head = _DIGEST_BYTES + 8
    begin = head + int.from_bytes(mapped[_DIGEST_BYTES:head], "little")
    tables, value = json.loads(mapped[head:begin])
    arrays = {
        name: np.frombuffer(mapped, dtype, size, _aligned(begin) + offset) if size else np.empty(0, dtype)
        for name, dtype, size, offset in tables
    }
    return arrays, value


def save(key: str, arrays: Mapping[str, np.ndarray], value: Any) -> None:
    """Store one-dimensional ``arrays`` and the JSON ``value`` under ``key``. If the cache is not writable,
    nothing is stored.
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
    """Delete stored files unread for `_KEPT_DAYS`, and the least recently read above `_KEPT_BYTES`."""
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
    """Return a hash of ``file`` from ``begin`` on: the hash of its block hashes, which threads compute."""

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
