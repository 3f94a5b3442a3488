"""Kernels of authors: compiled by annotation, or fused by hand with the tile primitives."""
