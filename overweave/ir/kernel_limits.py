"""Limits and units of the kernels that move data and signals."""

MOST_PEERS = 7  # where tiles of one kernel store: it has arguments for so many tensor maps
LEAST_WAVES = 1.5  # of a shard's tiles: from here on a second wave is computed while the first travels
INT32_BYTES = 4  # the unit of addresses of signals and messages
COPY_WORD_BYTES = 16  # what a thread loads and stores at once; rows are multiples of it
# Signals have this fixed space under every plan, so that data of one plan is never read as a signal of the next.
SIGNAL_CAPACITY = 4096
