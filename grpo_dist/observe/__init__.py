"""Recording of runs: files, terminal and trackers, and the metric catalogue. See README.md.

The tracker is imported on first use, so that the catalogue alone loads no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_dist.observe.tracker import EVENTS, LEDGER, TIMELINE, Tracker

__all__ = ["EVENTS", "LEDGER", "TIMELINE", "Tracker"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from grpo_dist.observe import tracker  # imports torch

    return getattr(tracker, name)
