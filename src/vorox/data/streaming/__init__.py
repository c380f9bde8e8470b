"""Training on text while it arrives: a cache whose chunk files come and go."""
