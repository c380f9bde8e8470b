"""Layer 2: host-side measurements: throughput, memory, device peaks."""
