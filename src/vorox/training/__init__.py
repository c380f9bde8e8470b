"""Layer 4: the training loop, checkpoints, resume and replay. Imports no engine."""
