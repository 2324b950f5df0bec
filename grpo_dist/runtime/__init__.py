"""Utilities for any process: concurrency, files, hardware, metering. Imports no policy, loop or actors."""

__version__ = "0.1.0"  # here for modules that must not import the package's public API
