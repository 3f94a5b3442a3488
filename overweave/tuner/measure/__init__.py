"""Measurement: the timer, the methods and baselines of a comparison, the search."""
