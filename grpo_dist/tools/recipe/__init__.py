"""Pipelines of stages: SFT, GRPO and rejection sampling, each using earlier results."""
