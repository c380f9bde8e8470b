"""Stages in threads, and the bounded queues between them."""
