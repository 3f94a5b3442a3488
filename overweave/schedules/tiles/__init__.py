"""Tiles of a kernel: their shapes, their order, and the table that a kernel claims rows of."""
