"""The measurements, one module a job: ``measure(task)`` yields the name of each line with what it found."""
