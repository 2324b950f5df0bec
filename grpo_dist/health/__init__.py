"""Whether a run is healthy: bounds on metrics, slow drift, and what is done about either."""
