"""What a GPU's arithmetic is, bit for bit: a table that one GPU writes and the interpreter is held against."""
