"""One run from start to end: preparation, checkpoints, recovery, preemption, resuming."""
