"""One Ray actor class per role, and its driver-side handle."""
