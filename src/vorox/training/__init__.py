"""Floor 2: the loop and what it needs. Never an engine."""
