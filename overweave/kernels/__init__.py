"""Kernels of the library: portable Triton, and, in a room each, Hopper kernels and those of packed messages."""
