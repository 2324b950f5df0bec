"""Sequences that hold what repeats once: DAPO-Math-17k's file has each of its 17,000 problems some 100 times.

All work per row (reading, rendering, tokenising, checks) is done for the distinct rows; a row is put together
when it is asked for. What took long is stored in `GRPO_DIST_CACHE`, under a name that is a hash of all that
decides it, and read back by the next start.
"""

from __future__ import annotations

import hashlib
import json
import marshal
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from io import BufferedIOBase
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import numpy as np

from grpo_dist.runtime.files import publish
from grpo_dist.runtime.model_files import cache_dir
from grpo_dist.types import Prompt

T = TypeVar("T")
V = TypeVar("V")

STORED_FROM = 10_000  # rows of a source; reading fewer takes no longer than a look at what is stored
REMEMBERED = 2**18  # distinct rows that later ones are compared with
_PART = 4096  # values hashed at once
_DIGEST_BYTES = 16


class Repeated(Sequence[T], Generic[T]):
    """A sequence of ``distinct`` values, some of which stand at several places.

    ``codes``: int32 [n], which of them stands at each place; None: each at one, in order.
    """

    def __init__(self, distinct: Sequence[T], codes: np.ndarray | None = None) -> None:
        self.distinct = distinct
        self.codes: np.ndarray = np.arange(len(distinct), dtype=np.int32) if codes is None else codes

    def __len__(self) -> int:
        return len(self.codes)

    @overload
    def __getitem__(self, place: int) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> list[T]: ...
    def __getitem__(self, place: int | slice) -> T | list[T]:
        if isinstance(place, slice):
            return [self._at(i) for i in range(*place.indices(len(self)))]
        return self._at(range(len(self))[place])

    def __iter__(self) -> Iterator[T]:
        return map(self._at, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def _at(self, place: int) -> T:
        return self.distinct[self.codes[place]]

    def counts(self) -> np.ndarray:
        """Return at how many places each distinct value stands, int64 [distinct]."""
        return np.bincount(self.codes, minlength=len(self.distinct))

    def first_places(self) -> np.ndarray:
        """Return the first place of each distinct value, int64 [distinct]."""
        return np.unique(self.codes, return_index=True)[1]

    def places(self, is_wanted: Callable[[T], bool]) -> np.ndarray:
        """Return the places of the values that are wanted, int64; asks once about each distinct one."""
        wanted = np.fromiter(map(is_wanted, self.distinct), bool, len(self.distinct))
        return np.flatnonzero(wanted[self.codes])


class Prompts(Repeated[Prompt]):
    """Prompts of which the same row may be several: each has a uid of its own.

    ``numbers``: int32 [n], how often the uid of each has occurred so far: "set-1f", "set-1f-2", ...
    """

    def __init__(
        self,
        distinct: Sequence[Prompt],
        codes: np.ndarray | None = None,
        numbers: np.ndarray | None = None,
    ) -> None:
        super().__init__(distinct, codes)
        self._numbers = np.ones(len(self), np.int32) if numbers is None else numbers

    @classmethod
    def join(cls, parts: Iterable[Sequence[Prompt]]) -> Prompts:
        """Return the prompts of all ``parts`` in order."""
        distinct: list[Prompt] = []
        codes, numbers = [np.empty(0, np.int32)], [np.empty(0, np.int32)]
        for part in parts:
            part = part if isinstance(part, Prompts) else cls(part)
            codes.append(part.codes + np.int32(len(distinct)))
            numbers.append(part._numbers)
            distinct += part.distinct
        return cls(distinct, np.concatenate(codes), np.concatenate(numbers))

    def _at(self, place: int) -> Prompt:
        prompt, number = self.distinct[self.codes[place]], self._numbers[place]
        return prompt if number == 1 else replace(prompt, uid=f"{prompt.uid}-{number}")

    def digest(self, part: Callable[[Prompt], bytes]) -> str:
        """Return the first 16 digits of the SHA-256 of uid and ``part`` of each prompt, one behind another;
        of many prompts it is stored.
        """
        parts = list(map(part, self.distinct))
        key = ""
        if len(self) >= STORED_FROM:
            tables = digest_parts([self.codes.tobytes(), self._numbers.tobytes(), *parts])
            names = [(prompt.uid, len(piece)) for prompt, piece in zip(self.distinct, parts, strict=True)]
            key = store_key(["digest", tables, names])
            if (stored := load(key)) is not None:
                return str(stored[1])
        places = zip(self.uids(), self.codes.tolist(), strict=True)
        digest = digest_parts(piece for uid, at in places for piece in (uid.encode(), parts[at]))
        if key:
            save(key, {}, digest)
        return digest

    def uids(self) -> Iterator[str]:
        names = [prompt.uid for prompt in self.distinct]
        for at, number in zip(self.codes.tolist(), self._numbers.tolist(), strict=True):
            yield names[at] if number == 1 else f"{names[at]}-{number}"


class ByUid(Mapping[str, Prompt]):
    """``prompts`` by uid, of which only the places are in memory."""

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
    """Return the distinct values in the order of their first places, where it is known which are the same."""
    return values.distinct if isinstance(values, Repeated) else values


def uids_of(prompts: Sequence[Prompt]) -> list[str]:
    """Return the uid of each prompt."""
    return list(prompts.uids()) if isinstance(prompts, Prompts) else [prompt.uid for prompt in prompts]


def each(values: Sequence[T], read: Callable[[T], V]) -> list[V]:
    """Return what ``read`` returns for each value; it is called once for each distinct one, and reads no uid
    and no location.
    """
    if not isinstance(values, Repeated):
        return [read(value) for value in values]
    results = [read(value) for value in values.distinct]
    return [results[at] for at in values.codes.tolist()]


def content(record: Any) -> bytes | None:
    """Return a hash that only an equal record has, with values of the same types; None for other values than
    those of JSON. A record may be long: what is remembered of many must not be.
    """
    try:
        dumped = marshal.dumps(record, 2)  # later versions depend on how often a value is referred to
    except ValueError:
        return None
    return hashlib.blake2b(dumped, digest_size=16).digest()


def digest_parts(parts: Iterable[bytes]) -> str:
    """Return the first 16 digits of the SHA-256 of ``parts``, one behind another."""
    digest, waiting = hashlib.sha256(), list[bytes]()
    for part in parts:
        waiting.append(part)
        if len(waiting) == _PART:
            digest.update(b"".join(waiting))
            waiting.clear()
    digest.update(b"".join(waiting))
    return digest.hexdigest()[:16]


def occurrences(codes: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Return how often each of ``codes`` has occurred up to its place, int32 [n].

    ``before``: int [codes], how often each has occurred earlier.

        [0, 1, 0, 0], [2, 0] -> [3, 1, 4, 5]
    """
    order = np.argsort(codes, kind="stable")
    ordered = codes[order]
    starts = np.searchsorted(ordered, ordered)  # the first place of the same code
    numbers = np.empty(len(codes), np.int32)
    numbers[order] = np.arange(len(codes)) - starts + 1 + before[ordered]
    return numbers


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
    digests = []
    for file in files:
        with file.open("rb") as opened:
            digests.append(_digest(opened).hex())
    return digests


def load(key: str) -> tuple[dict[str, np.ndarray], Any] | None:
    """Return the arrays and the JSON stored under ``key``; None where there are none, or damaged ones: the
    file begins with a hash of the rest.
    """
    try:
        with _place(key).open("rb") as opened:
            if opened.read(_DIGEST_BYTES) != _digest(opened):
                return None
            opened.seek(_DIGEST_BYTES)
            with np.load(opened, allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in stored.files}
    except OSError:
        return None
    return arrays, json.loads(arrays.pop("json").tobytes())


def save(key: str, arrays: Mapping[str, np.ndarray], value: Any) -> None:
    """Store ``arrays`` and what JSON holds of ``value`` under ``key``. Where the cache cannot be written the
    next start takes as long as this one.
    """
    place = _place(key)
    unfinished = place.with_name(f".{place.name}-{os.getpid()}.npz")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        stored: dict[str, Any] = {"json": np.frombuffer(json.dumps(value).encode(), np.uint8), **arrays}
        with unfinished.open("w+b") as opened:
            opened.write(bytes(_DIGEST_BYTES))
            np.savez(opened, **stored)
            opened.seek(_DIGEST_BYTES)
            digest = _digest(opened)
            opened.seek(0)
            opened.write(digest)
        publish(unfinished, place)
    except OSError:
        if unfinished.exists():
            unfinished.unlink()


def _digest(opened: BufferedIOBase) -> bytes:
    """Return a hash of a file from its position on."""
    return hashlib.file_digest(opened, partial(hashlib.blake2b, digest_size=_DIGEST_BYTES)).digest()


def _place(key: str) -> Path:
    return cache_dir() / "rows" / f"{key}.npz"
