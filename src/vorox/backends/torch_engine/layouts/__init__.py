"""Where parameters and gradients are: flat buffers, shards of FSDP2 or ZeRO, shares of tensor parallelism, stages."""
