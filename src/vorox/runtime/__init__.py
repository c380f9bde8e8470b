"""Layer 1: host-side measurements: throughput, memory, device peaks."""
