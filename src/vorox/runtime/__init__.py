"""Floor 1: host-side monitors that only read."""
