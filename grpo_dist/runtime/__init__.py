"""What any process needs: concurrency, files, hardware, metering. Nothing here knows policy, loop or
actors.
"""

__version__ = "0.1.0"  # here for those that must not import the package's face
