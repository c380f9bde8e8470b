"""Streaming: caches whose chunks are built and evicted while they are read."""
