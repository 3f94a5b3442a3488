"""Are results right: every plan through its public face, on CPU ranks and on GPUs, also when ranks fail."""
