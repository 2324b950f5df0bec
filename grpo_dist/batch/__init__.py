"""From scored groups to batch rows: advantages per token, and each rank's share of the rows."""
