"""Checkpoints of a run: written, committed, found and verified, and where weights come from."""
