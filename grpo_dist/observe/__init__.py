"""Where a run's numbers go and what each of them means: README.md of this folder.

A tracker is fetched when it is first asked for, so that the catalogue alone costs nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_dist.observe.tracker import EVENTS, TIMELINE, Tracker

__all__ = ["EVENTS", "TIMELINE", "Tracker"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from grpo_dist.observe import tracker

    return getattr(tracker, name)
