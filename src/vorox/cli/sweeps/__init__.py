"""The work of ``vorox tune`` and ``vorox ladder``: settings searched over many runs."""
