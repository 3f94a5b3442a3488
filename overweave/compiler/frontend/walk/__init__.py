"""The parts of a walk through a kernel: its loops, the words of the language, what is asked of its tree."""
