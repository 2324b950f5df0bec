"""Throughput benchmark of the whole loop: its speed, absolute and relative to the hardware limits."""
