"""Where a run's numbers go and what each of them means: README.md of this folder."""

from grpo_dist.tracking.tracker import EVENTS, TIMELINE, Tracker

__all__ = ["EVENTS", "TIMELINE", "Tracker"]
