"""Optimizers, and the one that a configuration names."""
