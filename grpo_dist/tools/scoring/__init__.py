"""Completions from a file, graded by rewards before anything is trained on these. See README.md."""
