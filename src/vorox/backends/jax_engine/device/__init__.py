"""What this machine computes with: devices, mesh and precision, inputs, results, profiler."""
