"""Child processes, and the signals that end them."""
