"""Each kernel with what it is given: read by launches on a GPU, the interpreter, ahead-of-time compilation and lint."""
