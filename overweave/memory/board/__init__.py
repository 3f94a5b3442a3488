"""What the ranks of one host tell each other outside of kernels, and why a call was given up."""
