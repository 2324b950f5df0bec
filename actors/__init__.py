import os

# Read when Ray is imported: SIGTERM while Ray starts ends the program in order, not by Ray's own handler in
# C++, which aborts it three seconds later, whatever it is still putting away.
os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
