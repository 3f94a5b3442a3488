"""Every kernel compiled ahead of time, and its PTX read."""
