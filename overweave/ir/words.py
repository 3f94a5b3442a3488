"""What kernels that move data count in."""

INT32_BYTES = 4  # as they address it
COPY_WORD_BYTES = 16  # what a thread of theirs loads and stores at once: rows are whole ones
