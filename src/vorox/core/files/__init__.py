"""Files that are complete or absent, name their holder, and are read with limits."""
