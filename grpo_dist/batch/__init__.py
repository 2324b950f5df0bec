"""From scored groups to rows of a batch: advantages per token, and the share of each rank."""
