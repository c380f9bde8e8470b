"""Vorox: language model training whose every run is replayable and auditable."""

__version__ = "0.1.0"
