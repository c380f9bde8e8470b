"""Checkpoints of a run: written, committed, found, verified, averaged, and where weights come from."""
