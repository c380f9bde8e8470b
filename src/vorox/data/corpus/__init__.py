"""The sources of a run: their caches are opened or begun, and recorded as the run's own views."""
