"""The blocks of the decoder: attention and MLP, mixtures of experts, Mamba-2."""
