"""All runs below a folder: a row of each, and the same for Prometheus."""
