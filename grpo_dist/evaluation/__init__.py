"""Evaluates models on held-out problems, and compares two models. See README.md."""
