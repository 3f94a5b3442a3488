"""Communication that other compilers decided, as proven plans."""
