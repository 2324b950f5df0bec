"""Environments: what the policy acts in over several turns, its tools, and the sandbox for code it writes."""
