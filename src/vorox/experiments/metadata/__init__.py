"""The metadata database: which run used which data, as intervals in SQLite or PostgreSQL."""

from vorox.experiments.metadata.cache import MetadataCache, QueryResult, Replacement
from vorox.experiments.metadata.exporter import BackgroundExporter

__all__ = ["BackgroundExporter", "MetadataCache", "QueryResult", "Replacement"]
