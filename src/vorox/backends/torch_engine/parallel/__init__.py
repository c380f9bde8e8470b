"""Models divided among ranks: their plans, shares and pipelines."""
