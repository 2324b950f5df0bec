"""What a configuration would do on a cluster that nobody has to have: memory, times, cost, the best split."""
