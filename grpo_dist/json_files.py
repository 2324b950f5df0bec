"""JSON that a run reads back from its files, whatever has become of these."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Any:
    """Raises OSError for a file that cannot be read, and ValueError for one that is no JSON in UTF-8, or that
    is nested deeper than the reader's stack.
    """
    return parse_json(path.read_bytes())


def parse_json(text: str | bytes) -> Any:
    """Raises ValueError as `read_json`."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
