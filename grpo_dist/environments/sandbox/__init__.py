"""Processes for code of environments and of the policy, and what such code can reach."""
