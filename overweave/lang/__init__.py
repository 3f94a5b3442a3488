"""What a kernel author writes on the device: the tile table of fused kernels, and the tile primitives."""
