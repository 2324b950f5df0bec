"""What any process needs: concurrency, files, hardware, metering. Nothing here knows policy, loop or
actors.
"""
