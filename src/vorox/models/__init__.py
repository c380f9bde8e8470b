"""Floor 1: descriptions of models. No tensors."""
