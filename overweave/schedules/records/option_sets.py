"""Options that methods of several families take together."""

from __future__ import annotations

from overweave.schedules.records import options
from overweave.schedules.records.record import Grid, Margin, MarginCase

MOVER = (options.MOVER, options.COPY_PROGRAMS)
FUSED = (options.PIECES, options.ORDER, *options.TILES)
PUSHED = (options.PIECES, options.ORDER, *MOVER, *options.TILES, options.ROTATION)
STORED_ROUND = (options.PIECES, *options.TILES)
WAVES = (options.GROUPS, options.LIBRARY_SMS, *options.TILES)
STORED = (options.ORDER, *STORED_ROUND)
CUT = (options.PIECES, options.COL_PIECES)
ISLANDS = (*CUT, options.ISLAND, options.LIBRARY_SMS, *options.TILES)

AS_IT_IS: Grid = {}
PIECES: Grid = {"pieces": (1, 2, 4)}
IN_TWO: Grid = {"pieces": (2, 1, 4)}  # of which the model can say nothing: two were best, or close to it
EARLY: Grid = {"matmul": ("early",)}
BY_KERNEL: Grid = {"mover": ("copy_kernel",), "copy_programs": (8, 16, 32)}

# Packed messages. MEASURED: with 2 us the choice for an all-reduce is the quickest, or within 4 % of it, on all 20
# problems of 1 to 512 rows of benchmarks/results/packed.h200x2.2026-11-22.txt, and the quickest on all 32 of the two
# other operators in packed_gather_scatter.*; of 4 ranks on 57 of the 60 of packed.h200x4.*, within 4.3 % on the others
# (captured; tests/tuner/test_messages.py).
OF_MESSAGES = MarginCase(margin=Margin(2.0, 0.0))
# Tiles that store at peers. MEASURED: `python -m campaigns.sim_accuracy` of own_sums.* finds all-reduces round a ring
# whose shards have a second wave of tiles predicted 8 % too short to 2 % too long, on two H200s and on four, and no
# more than 31 us too short; those with one wave 31 % too short to 12 % too long, and up to 91 us too short, for there
# each hop waits for the one before. Reduce-scatters of stored.* are predicted 4 to 19 % too short on four.
OF_SUMS_IN_A_RING, OF_STORES = Margin(25.0, 0.02), Margin(75.0, 0.04)
# Plans that nobody has measured. They must be predicted to gain more than any prediction has missed of plans that were:
# 91 us of one problem of all-reduces (above), and 12 % of 95 in 100 rows of `python -m campaigns.sim_accuracy`.
NOT_MEASURED = MarginCase(margin=Margin(100.0, 0.12))
