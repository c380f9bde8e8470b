"""The work of ``vorox data``: one module per group of commands."""
