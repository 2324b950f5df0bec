"""`grpo-dist check`: everything that can be found wrong before a run is started."""
