"""User-supplied components: how to name, find, try and record them. See `guides/write_your_own.md`."""
