"""A kernel as its author wrote it: its files, its names, its directives, and the form that the rest reads."""
