"""What the model reads and where its answer ends: chat templates, control tokens, ends of samples."""
