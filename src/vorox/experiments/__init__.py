"""Layer 1: metrics, sinks, run artifacts and the metadata database."""
