"""Images in documents: decoded, laid out as patches, and their place among the tokens."""
