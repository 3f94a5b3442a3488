"""How fast the parts are: kernels, copies, latencies, and what a call costs the host."""
