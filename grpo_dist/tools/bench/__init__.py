"""The throughput benchmark of the whole loop: how fast it is, and how near to what the machine can do."""
