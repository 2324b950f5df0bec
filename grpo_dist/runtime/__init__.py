"""What any process needs: concurrency, files, hardware, metering. It knows nothing of training."""
