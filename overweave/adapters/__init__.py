"""Thin layers between overweave and torch's fused operators, torch's parallel styles, and model libraries."""
