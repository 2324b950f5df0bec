"""Snapshots of the policy's weights in files, which evaluation engines load.

    policy rank 0   gather, pack, checksum | thread: write weights.bin | update ...
    engines                                                            | read, compare the checksum, load

The file has the buckets of a weight sync, one after the other, and their checksum. Later updates do not
change it, and an engine that replaces a lost engine reads it again.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from pydantic import TypeAdapter
from torch import Tensor

from grpo_dist.policy.weight_buckets import ParameterSpec
from grpo_dist.runtime.files import write_text

WEIGHTS, DESCRIPTION = "weights.bin", "snapshot.json"


@dataclass(frozen=True)
class Snapshot:
    """The weights in ``directory``. ``parameters``, ``bucket_bytes`` and ``adapter_scale``: as for a weight
    sync; ``version``: of the policy.
    """

    directory: str
    version: int
    bucket_bytes: int
    adapter_scale: float | None
    parameters: tuple[ParameterSpec, ...]

    @property
    def file(self) -> Path:
        return Path(self.directory) / WEIGHTS

    def describe(self) -> None:
        """Write the description after the weights: it marks the snapshot as complete."""
        write_text(Path(self.directory) / DESCRIPTION, json.dumps(asdict(self)))


def read_snapshot(directory: Path) -> Snapshot | None:
    """Return the snapshot in ``directory``; None if it is incomplete. Raises ValueError for a damaged
    description.
    """
    path = directory / DESCRIPTION
    if not path.exists():
        return None
    try:
        return replace(TypeAdapter(Snapshot).validate_json(path.read_bytes()), directory=str(directory))
    except ValueError as error:
        raise ValueError(
            f"{path}: expected the description of a snapshot ({' '.join(str(error).split())}); delete "
            f"{directory}, whose evaluation is then left out"
        ) from error


class SnapshotWriter:
    """The sending side of a transport to a file. Keeps host memory for all weights for the next snapshot."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._path: Path | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def begin(self, path: Path) -> None:
        """Write the next weights to ``path``. Waits for the previous write, which uses the same memory."""
        if self._thread is not None:
            self._thread.join()  # bounded: by the disk; the caller has a deadline
        self._path, self._thread, self._error = path, None, None

    def outgoing(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        """Yield memory for each bucket. A thread writes the file once the last one is filled."""
        if len(self._memory) < sum(sizes):
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8)
        begin = 0
        for size in sizes:
            yield self._memory[begin : begin + size]
            begin += size
        self._thread = threading.Thread(target=self._write, args=(begin,), name="snapshot", daemon=True)
        self._thread.start()

    def incoming(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        raise AssertionError("a writer receives nothing")

    def agree(self, agrees: bool) -> bool:
        raise AssertionError("nobody reads while a snapshot is written")

    def close(self) -> None:
        """Nothing: the thread ends by itself."""

    def is_written(self) -> bool:
        """Return whether the file is written. Raises the error of a write that failed. Any thread may call
        it.
        """
        if self._thread is not None and self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    def _write(self, size: int) -> None:
        assert self._path is not None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("wb") as file:
                file.write(self._memory[:size].numpy().data)
        except BaseException as error:
            self._error = error


class SnapshotReader:
    """The receiving side: yields the contents of ``path``. Raises RuntimeError if bytes are missing."""

    device = torch.device("cpu")

    def __init__(self, path: Path) -> None:
        self._path = path

    def outgoing(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        raise AssertionError("a reader sends nothing")

    def incoming(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        with self._path.open("rb") as file:
            for size in sizes:
                flat = torch.empty(size, dtype=torch.uint8)
                if (count := file.readinto(flat.numpy().data)) != size:
                    raise RuntimeError(f"{self._path}: expected {size} more bytes and found {count}")
                yield flat

    def agree(self, agrees: bool) -> bool:
        raise AssertionError("nobody writes while a snapshot is read")

    def close(self) -> None:
        """Nothing: `incoming` closes the file."""


def discard(directory: Path) -> None:
    """Delete a snapshot, its description first, so that a partial snapshot never looks complete."""
    (directory / DESCRIPTION).unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)
