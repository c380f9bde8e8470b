"""The work of ``vorox runs``, ``vorox checkpoints`` and ``vorox dash``."""
