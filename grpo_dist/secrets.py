"""What must not be written where many can read it: keys, tokens and passwords in a configuration.

A resolved configuration is written to run directories, checkpoints, `stage.json` and trackers. It loads
again, but with *** for what was secret: such values belong into the environment (`api_key_env` of a judge).
"""

from __future__ import annotations

import re
from typing import Any

HIDDEN = "***"
_KEY = r"(?:api|access|secret|private)[_-]?key"
# Tokens in the plural are mostly counted (`max_tokens`).
_TOKEN = r"token|(?:api|access|auth|bearer|refresh|hf)[_-]?tokens?"
_WORD = r"secret|password|passwd|passphrase|pwd|credential|cookie"
_SECRET = re.compile(rf"(?:^|[_\-.])(?:(?:{_KEY}|{_WORD})s?|{_TOKEN}|authorization)$", re.IGNORECASE)
_TOKEN_ID = re.compile(r"tokens?$", re.IGNORECASE)
_USER = re.compile(r"(?<=://)[^/?#\s]+(?=@)")  # of https://user:password@host/
_PARAMETER = re.compile(r"(?<=[?&])([^?&=#\s]+)=([^?&#\s]+)")  # of https://host/?api_key=k&n=1
_SECRET_PARAMETER = re.compile(r"(?:^|[_\-.])(?:key|sig|signature|auth)$", re.IGNORECASE)


def masked(value: Any) -> Any:
    """A copy of plain mappings and lists with *** for each secret.

    {"api_key": "k", "max_tokens": 8, "base_url": "http://me:pw@host/v1?token=t"}
        -> {"api_key": "***", "max_tokens": 8, "base_url": "http://***@host/v1?token=***"}
    """
    if isinstance(value, str):
        return _PARAMETER.sub(_masked_parameter, _USER.sub(HIDDEN, value))
    if isinstance(value, dict):
        return {
            key: _hidden(str(key), inner) if _SECRET.search(str(key)) else masked(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [masked(inner) for inner in value]
    return value


def _hidden(key: str, value: Any) -> Any:
    """``value`` of a secret ``key`` with *** for all that it holds, but for null, "", true and false; the
    number of an `end_token` says which token it is.
    """
    if isinstance(value, dict):
        return {inner: _hidden(key, held) for inner, held in value.items()}
    if isinstance(value, list):
        return [_hidden(key, held) for held in value]
    if value in (None, "") or isinstance(value, bool):
        return value
    return value if not isinstance(value, str) and _TOKEN_ID.search(key) else HIDDEN


def _masked_parameter(found: re.Match[str]) -> str:
    name = found[1]
    secret = _SECRET.search(name) or _SECRET_PARAMETER.search(name)
    return f"{name}={HIDDEN}" if secret else found[0]
