"""Symbolic interpretation of a kernel: its expressions, its loops, the functions of `tl`, its statements."""
