"""JSON that a run reads back from its files, whatever has become of these."""

from __future__ import annotations

import errno
import json
import stat
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Any:
    """Raises OSError for what cannot be read or is no regular file (a pipe would never end), and ValueError
    for a file that is no JSON in UTF-8, or that is nested deeper than the reader's stack.
    """
    check_regular(path)
    return parse_json(path.read_bytes())


def check_regular(path: Path) -> None:
    """Raises OSError for a pipe or a device, which may have no end. A directory is left to who opens it."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))


def parse_json(text: str | bytes) -> Any:
    """Raises ValueError as `read_json`."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
