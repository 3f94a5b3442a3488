"""A transformer block as `overweave bench block` times it: sizes, ways to compute it, and predictions."""
