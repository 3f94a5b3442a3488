"""What moves between versions of Triton, and with which versions of Triton and of PyTorch overweave is tested."""
