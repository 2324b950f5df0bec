"""`grpo-dist eval`: a model on held-out problems, and two models against each other."""
