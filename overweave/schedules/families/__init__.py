"""What each family of methods moves: gathers, reductions, exchanges, packed messages."""
