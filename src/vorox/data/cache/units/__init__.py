"""How the documents of a unit become the rows of its chunks: duplicates, tokens, packing."""
