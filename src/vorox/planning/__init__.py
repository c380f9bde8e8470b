"""Layer 3: memory, time and disk of a run, estimated from its configuration and a machine before anything is built."""
