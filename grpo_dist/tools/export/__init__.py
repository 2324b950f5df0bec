"""`grpo-dist export`: any checkpoint of a run as a Hugging Face directory, and on the hub."""
