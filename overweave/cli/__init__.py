"""The command line: one file for each command in `commands`, and what they share: output, and the start of ranks."""
