"""A transformer block as `overweave bench block` times it: its sizes, the ways to compute it, what a model predicts."""
