"""torch's fused symmetric-memory operators, answered by overweave: `overweave.install()`."""
