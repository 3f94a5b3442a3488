"""A Plan bound to buffers, streams and kernels and run: on GPUs, on CPU ranks, interpreted, and traced."""
