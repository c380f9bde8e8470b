"""Arrays in files: safetensors, shards and Orbax, read and written by name, and their fingerprint."""
