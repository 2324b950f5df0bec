"""Pipelines of stages: supervised training, GRPO and rejection sampling, each on earlier results."""
