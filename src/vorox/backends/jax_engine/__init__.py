"""The JAX engine; ``vorox.backends.load("jax")`` imports its ``engine`` module."""
