"""Recording of runs: files, terminal and trackers, and the metric catalogue. See README.md."""
