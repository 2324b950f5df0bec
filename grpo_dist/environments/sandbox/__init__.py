"""Processes for environment code and policy code, and their confinement."""
