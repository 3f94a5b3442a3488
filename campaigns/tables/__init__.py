"""Compiled kernels measured, and the tables that a tuner chooses from."""
