"""Text to ids and back, and what a tokenizer is trained on."""
