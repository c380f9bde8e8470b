"""Attention of whole rows, within documents, and over the positions that several ranks divide."""
