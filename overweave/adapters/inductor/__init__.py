"""A pass over Inductor's graphs: collectives beside matmuls become overweave's operators."""
