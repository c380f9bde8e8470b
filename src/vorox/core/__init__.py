"""Layer 0: configuration, engine protocol, batches, ranks and file primitives.

Imports only numpy, pydantic and the standard library.
"""
