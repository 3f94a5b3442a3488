"""Lists of moves, the one way to write a schedule, and how signals are derived from them."""
