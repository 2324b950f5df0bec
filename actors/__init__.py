import os

# Read when Ray is imported: a SIGTERM during Ray's start then ends the program in order. Ray's C++ handler
# would abort it after three seconds, even during cleanup.
os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
