"""`grpo-dist score`: grade completions from a file, to test rewards before training. See README.md."""
