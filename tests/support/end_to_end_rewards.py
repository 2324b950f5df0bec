"""Custom rewards, as a user would write them."""

import time


def digit_share(completion: str) -> float:
    """Return the share of characters that are digits."""
    return sum(c.isdigit() for c in completion) / max(len(completion), 1)


def brevity(completion: str) -> float:
    """Return how much shorter than 100 characters the completion is, as a share."""
    return 1 - len(completion) / 100


def slow(completion: str) -> float:
    """Take 0.4 s, so that something can happen to a run between two steps."""
    time.sleep(0.4)
    return 0.0
