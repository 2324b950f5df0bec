"""How weights travel from the policy to other processes: connections, transports, vLLM's receiver."""

WEIGHT_TRANSFER = "grpo_dist"  # what vLLM calls the receiving side of this project's weight sync
