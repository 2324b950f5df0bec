"""Units that more than one module counts in."""

GIB = 2**30
