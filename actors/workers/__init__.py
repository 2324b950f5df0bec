"""One Ray actor class for each role, and the handle that the driver has of it."""
