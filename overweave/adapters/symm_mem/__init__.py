"""overweave's kernels behind torch's fused symmetric-memory operators: `overweave.install()`."""
