"""Timelines as a reader sees them: text in a terminal, a PNG file, a page for a browser."""
