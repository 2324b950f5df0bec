"""A user's own pieces: one way to name, find, try and record them. `guides/write_your_own.md` shows each."""
