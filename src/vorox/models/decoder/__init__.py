"""The native decoder: its spec, positions, layers and how documents are separated."""
