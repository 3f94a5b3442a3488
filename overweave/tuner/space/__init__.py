"""The search space: the candidates of a problem, and the words that name problems."""
