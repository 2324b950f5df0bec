"""Runs on shared clusters: submit, status, logs and stop, using the templates in `launch/`."""
