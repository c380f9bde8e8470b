"""Checkpoints in the formats of other libraries, and their comparison with what was trained."""
