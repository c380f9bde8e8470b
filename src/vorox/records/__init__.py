"""Layer 1: the records of a run on disk, which its processes write and everyone reads through here."""
