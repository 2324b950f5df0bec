"""The version of this package, for those that must not import the package's face."""

__version__ = "0.1.0"
