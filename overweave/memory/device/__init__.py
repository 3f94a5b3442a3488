"""What kernels call: signals, messages, copies and the head of a call, as device functions."""
