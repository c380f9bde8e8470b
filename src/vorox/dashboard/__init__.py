"""The dashboard: a local web page on runs, read from their directories."""
