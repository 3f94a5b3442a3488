"""Moves that are searched for the links of a machine: gathers, their mirrors, and all-to-alls."""
