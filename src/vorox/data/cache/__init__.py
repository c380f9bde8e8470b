"""The packed token cache: immutable chunk files named by an append-only manifest log."""
