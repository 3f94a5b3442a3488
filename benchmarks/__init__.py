"""Shapes, results, and the table that the guarantees show of them."""
