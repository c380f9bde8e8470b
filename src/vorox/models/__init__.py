"""Layer 2: model descriptions, weight files and cost estimates, without a framework."""
