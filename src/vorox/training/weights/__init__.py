"""Initial weights of a run, and the models that it trains beside: base, teacher, reference."""
