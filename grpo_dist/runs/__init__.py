"""One run from start to end: preparation, training, checkpoints, recovery, preemption, resuming."""
