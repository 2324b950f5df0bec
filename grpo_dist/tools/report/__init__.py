"""`grpo-dist report`: one or several runs as a page that needs nothing but a browser."""
