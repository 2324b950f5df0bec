"""The throughput benchmark of the loop and of its parts."""
