"""Layer 2: metrics, sinks, run artifacts and the metadata database."""
