"""The blocks of the native decoder, and how they are computed: kernels, compilation, CUDA graphs."""
