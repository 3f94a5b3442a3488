"""Plans on CPU ranks: real data and real signals between processes."""
