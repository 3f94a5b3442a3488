"""What the tuner searches: the candidates of a problem, and the words that name problems."""
