"""Kernel calls with all their arguments: for launches on a GPU, the interpreter, ahead-of-time compilation and lint."""
