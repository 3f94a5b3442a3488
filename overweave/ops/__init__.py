"""The public functions: one file for each operator, the way of a call, and kernels of authors."""
