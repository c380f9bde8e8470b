"""Harness tasks of a run: loading them, and scoring a model on them."""
