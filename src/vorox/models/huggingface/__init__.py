"""Models of transformers: families, config.json, weights and their names, and adapters on them."""
