"""Functions that users name: which may be imported, and their identity."""
