"""Where a model comes from, and the configuration that follows from it."""
