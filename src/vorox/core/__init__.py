"""Floor 0: the nouns and rules that every room shares. Only numpy, pydantic and the standard library."""
