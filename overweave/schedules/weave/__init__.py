"""Schedules woven around an author's kernel: which transport, which waits, in which order of tiles."""
