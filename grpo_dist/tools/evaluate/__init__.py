"""`grpo-dist eval`: evaluate a model on held-out problems, and compare two evaluations."""
