"""Floor 1: records of a run: metrics, sinks, artifacts."""
