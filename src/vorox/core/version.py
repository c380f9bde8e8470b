"""The version of Vorox."""

__version__ = "0.1.0"
