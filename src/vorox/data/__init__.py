"""Layer 1: text to batches. Numpy only; works with neither torch nor JAX installed."""
