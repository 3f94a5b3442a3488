"""Shapes, results, and the table that the README shows of them."""
