"""How weights travel from the policy to other processes: connections, transports, vLLM's receiver."""
