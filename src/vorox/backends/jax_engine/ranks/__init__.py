"""Processes that train together: their group, shards and collectives."""
