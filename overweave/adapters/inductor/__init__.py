"""A pass over Inductor's graphs that fuses collectives and the matmuls next to them into overweave's operators."""
