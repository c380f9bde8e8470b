"""What this machine computes with: its device, threads and precision, copies between it and the host, inputs."""
