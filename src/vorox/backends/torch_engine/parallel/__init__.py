"""Parameters, sums and losses of several ranks: FSDP2, tensor parallelism, pipelines, ZeRO."""
