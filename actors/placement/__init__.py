"""Which devices and nodes each role gets: demands, whether they fit, and their reservation."""
