"""The parts of a walk through a kernel: what it evaluates, its loops, the words of the language, its tree."""
