"""Checks of a machine with GPUs, one command: what holds here, and what does not."""
