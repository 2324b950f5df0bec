"""A custom reward, as a user would write it."""


def digit_share(completion: str) -> float:
    """Return the share of characters that are digits."""
    return sum(c.isdigit() for c in completion) / max(len(completion), 1)
