"""Runs on shared clusters: submit, status, logs and stop, by the templates in `launch/`."""
