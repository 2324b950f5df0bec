"""Predicts memory, times, cost and the best split of GPUs, without access to the cluster."""
