"""What each family of methods moves where moves are no list: sums, packed messages, waves, finer pieces."""
