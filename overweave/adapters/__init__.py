"""Thin plugs between overweave and what others built: torch's fused operators, parallel styles, model libraries."""
