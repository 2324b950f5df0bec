"""Shared test helpers: fake workers, generated data, real processes of several kinds."""
