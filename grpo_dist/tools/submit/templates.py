"""Find the files of `launch/`: next to the packages in a checkout, else where the wheel installed them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parents[3] / "launch"
INSTALLED = "share/grpo-dist/launch"


def template(name: str) -> str:
    """Return the text of `launch/NAME`. Raises FileNotFoundError for a broken installation."""
    here = _CHECKOUT / name
    if here.is_file():
        return here.read_text(encoding="utf-8")
    try:
        found = [f for f in files("grpo-dist") or [] if f.as_posix().endswith(f"{INSTALLED}/{name}")]
    except PackageNotFoundError:
        found = []
    if not found:
        raise FileNotFoundError(f"launch/{name} is not installed; install grpo-dist again")
    return Path(str(found[0].locate())).read_text(encoding="utf-8")
