"""Conversations: columns read as messages, rendered by a template, with the ranges of their answers."""
