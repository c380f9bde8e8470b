"""The JAX engine. Nothing is imported here; ``vorox.backends.load("jax")`` takes ``engine``."""
