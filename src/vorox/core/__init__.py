"""Layer 0: configuration, run directory, engine protocol and file primitives.

Imports only numpy, pydantic and the standard library.
"""
