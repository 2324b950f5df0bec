"""grpo-dist: GRPO training of language models on verifiable problems. This package is what happens; `actors`
is where.
"""

__version__ = "0.1.0"
