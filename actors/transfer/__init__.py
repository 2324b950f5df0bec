"""Transfer weights from the policy to other processes: connections, transports, vLLM's receiver."""

WEIGHT_TRANSFER = "grpo_dist"  # vLLM's name for the receiving side of this project's weight sync
