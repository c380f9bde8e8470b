"""Provenance: which documents a step saw, which steps saw a document, and other queries on the data of a run."""
