"""The lint of compiled kernels: what their PTX must promise about order, waits and signals."""
