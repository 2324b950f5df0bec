"""What must not be written where many can read it: keys, tokens and passwords in a configuration.

A resolved configuration is written to run directories, checkpoints, `stage.json` and trackers. It loads
again, but with *** for what was secret: such values belong into the environment (`api_key_env` of a judge).
"""

from __future__ import annotations

import re
from typing import Any

HIDDEN = "***"
_SECRET = re.compile(
    r"(?:^|[_\-.])(?:(?:api|access|secret|private)[_-]?key|token|secret|password|passwd|credentials"
    r"|authorization)$",
    re.IGNORECASE,
)
_USER = re.compile(r"(?<=://)[^/@\s]+(?=@)")  # of https://user:password@host/


def masked(value: Any) -> Any:
    """A copy of plain mappings and lists with *** for each secret.

    {"api_key": "k", "max_tokens": 8, "base_url": "http://me:pw@host/v1"}
        -> {"api_key": "***", "max_tokens": 8, "base_url": "http://***@host/v1"}
    """
    if isinstance(value, str):
        return _USER.sub(HIDDEN, value)
    if isinstance(value, dict):
        return {
            key: HIDDEN if isinstance(inner, str) and inner and _SECRET.search(str(key)) else masked(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [masked(inner) for inner in value]
    return value
