"""The version of Vorox."""

__version__ = "0.2.0"
