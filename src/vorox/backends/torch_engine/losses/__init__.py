"""Objectives and their sums over the targets of a batch."""
