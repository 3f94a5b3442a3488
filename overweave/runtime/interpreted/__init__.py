"""The portable kernels under the Triton interpreter, and the repairs that it needs."""
