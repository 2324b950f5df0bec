"""How good a model is on held-out problems, and whether another is better. See README.md."""
