"""The metadata database: which run used which data, as intervals in SQLite or PostgreSQL."""

from vorox.experiments.metadata.cache import MetadataCache, QueryResult
from vorox.experiments.metadata.tables import Row
from vorox.experiments.metadata.writer import MetadataWriter

__all__ = ["MetadataCache", "MetadataWriter", "QueryResult", "Row"]
