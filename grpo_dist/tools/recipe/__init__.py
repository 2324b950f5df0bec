"""Recipes of several stages: supervised training, GRPO and rejection sampling, each on what came before."""
