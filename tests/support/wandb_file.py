"""What an offline run of wandb wrote, read back: a header, then records in blocks of 32 KiB, as in the log of
LevelDB.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from tests.support.patience import wait_until

_BLOCK, _HEADER = 32768, 7
_FULL, _FIRST, _LAST = 1, 2, 4


def records(path: Path) -> list[Any]:
    """Yield the protocol buffers of one `.wandb` file that are completely written."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts, found = path.read_bytes(), 7, b"", []
    while at + _HEADER <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:  # the rest of a block is empty
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + _HEADER])
        if at + _HEADER + length > len(data):
            break
        part, at = data[at + _HEADER : at + _HEADER + length], at + _HEADER + length
        parts = part if kind in (_FULL, _FIRST) else parts + part
        if kind in (_FULL, _LAST):
            found.append(Record.FromString(parts))
    return found


def offline_run(directory: Path) -> list[Any]:
    """Return the records of the run in ``directory``; its writer process may lag."""
    (path,) = directory.glob("offline-run-*/*.wandb")

    def is_whole() -> bool:
        return bool(found := records(path)) and found[-1].WhichOneof("record_type") == "exit"

    wait_until(is_whole, f"{path}: no end")
    return records(path)


def history(found: list[Any]) -> list[dict[str, Any]]:
    """Return the logged values, one mapping per step."""
    rows = [r.history.item for r in found if r.WhichOneof("record_type") == "history"]
    return [{i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items} for items in rows]


def config(found: list[Any]) -> dict[str, Any]:
    """Return the top-level keys of the configuration."""
    runs = [r.run for r in found if r.WhichOneof("record_type") == "run"]
    return {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in runs[0].config.update}
