"""Parts of documents that are generated from the code, between two marks:

<!-- begin generated: metrics -->
...
<!-- end generated: metrics -->
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def with_part(text: str, name: str, part: str) -> str:
    """Return ``text`` with ``part`` between the marks of ``name``. Raises ValueError where there are none."""
    begin, end = f"<!-- begin generated: {name} -->", f"<!-- end generated: {name} -->"
    before, found, rest = text.partition(begin)
    _, also_found, after = rest.partition(end)
    if not (found and also_found):
        raise ValueError(f"no marks {begin} ... {end}; put them where the generated part belongs")
    return f"{before}{begin}\n{part.strip()}\n{end}{after}"


def refresh(document: Path, name: str, part: str, *, arguments: Sequence[str]) -> int:
    """Write ``part`` into ``document``; with ``--check`` only compare. Returns the exit code: 1 where the
    check finds it out of date.
    """
    now = document.read_text()
    wanted = with_part(now, name, part)
    if "--check" in arguments:
        if now != wanted:
            print(
                f"{document}: the generated part `{name}` is out of date; run `make reference` to update it"
            )
        return int(now != wanted)
    document.write_text(wanted)
    return 0
