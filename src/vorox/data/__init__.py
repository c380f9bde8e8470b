"""Layer 2: text to batches. Numpy only; works with neither torch nor JAX installed."""
