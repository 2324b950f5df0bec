"""Translation of other trainers' recipes."""
