"""Multi-turn environments, their tools, and the sandbox that runs the policy's code."""
