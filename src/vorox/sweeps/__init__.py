"""Hyper-parameter sweeps: search space, search, trials as ordinary runs, execution on Ray."""
