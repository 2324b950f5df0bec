"""`grpo-dist report`: shows one or several runs as a page that only needs a browser."""
