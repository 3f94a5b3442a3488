"""Device functions that kernels call: signals, messages, copies and the prologue of a call."""
