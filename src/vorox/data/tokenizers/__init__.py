"""Tokenizers: loading, training, encoding and decoding."""
