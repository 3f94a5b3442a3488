"""The command line: one file for each command in `commands`, beside what commands print and how they start ranks."""
