"""YAML: a defensive reader, and a writer that YAML 1.1 and 1.2 read alike."""
