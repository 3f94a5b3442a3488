"""Measurement: the one timer, the methods that a comparison holds side by side, the search."""
