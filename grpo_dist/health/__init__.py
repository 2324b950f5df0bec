"""Whether a run is healthy: bounds on metrics, and what is done where one is passed."""
