"""Shared by the tests: fake workers, generated data, real processes of several kinds."""
