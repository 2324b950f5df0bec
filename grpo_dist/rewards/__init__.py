"""Scores completions: reward functions, the processes they run in, and the weighted sum."""
