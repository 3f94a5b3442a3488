"""What kernels that move data and signals count in."""

MOST_PEERS = 7  # at which the tiles of a kernel store: it has a place for so many tensor maps
LEAST_WAVES = 1.5  # in which a shard has a second wave of tiles: one is computed while the other travels
INT32_BYTES = 4  # as they address it
COPY_WORD_BYTES = 16  # what a thread of theirs loads and stores at once: rows are whole ones
# The same words hold signals under every plan: what one plan leaves behind in its buffers must never read as a signal
# of the next.
SIGNAL_CAPACITY = 4096
