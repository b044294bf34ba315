"""The version of girih."""

__version__ = "0.1.0"
