"""`grpo-dist export`: writes a run's checkpoint as a Hugging Face directory and uploads it to the hub."""
