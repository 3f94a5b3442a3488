"""Where a tile stores its result and tells so: at its own rank, at a peer, or, a sum, at every rank, of which peers are
told (`TileRow.to`).

`peers.places` has a row for each rank of the group, the own one first and the others as they follow it: where its
signals lie, and how many bytes its slot lies behind the own one. A buffer of the workspace is equally far away. Behind
them stands where sums of peers lie here, if sums go to every rank, and how far apart the Hopper kernel stores its
strips.
"""

import triton
import triton.language as tl

from overweave.ir.tile_order import ALL_RANKS
from overweave.lang.tile_table import SIGNAL, SIGNALS_NOBODY, TO, notify, read_column
from overweave.memory.device.signals import STRIDE

AT_ALL = tl.constexpr(ALL_RANKS)


@triton.jit
def away(pointer, peers, steps):
    """What `pointer` is in the memory of the rank so many steps behind the own one."""
    distance = tl.load(peers.places + 2 * steps + 1)
    return tl.multiple_of((pointer.to(tl.int64, bitcast=True) + distance).to(pointer.dtype, bitcast=True), 16)


@triton.jit
def sums_at(out, peers, steps):
    """Where sums that are in `out` here go at the rank so many steps behind the own one."""
    place = tl.load(peers.places + 2 * peers.everyone) + tl.load(peers.places + 2 * steps + 1)
    return tl.multiple_of(place.to(out.dtype, bitcast=True), 16)


@triton.jit
def signals_of(peers, steps):
    """The signals of that rank."""
    return tl.load(peers.places + 2 * steps).to(tl.pointer_type(tl.int32))


@triton.jit
def target_at(target, table, tile, peers):
    """The output that a tile writes, at the rank where it belongs; of a sum that all ranks get, the own one's."""
    return away(target, peers, tl.maximum(read_column(table, tile, TO), 0))


@triton.jit
def finish_stored_tile(table, tile, peers, verdict, world_size):
    """As `lang.finish_tile`, wherever the tile is stored."""
    signal = read_column(table, tile, SIGNAL)
    if signal != SIGNALS_NOBODY:
        to = read_column(table, tile, TO)
        first = tl.where(to == AT_ALL, 1, to)
        end = tl.where(to == AT_ALL, world_size, to + 1)
        for steps in range(first, end):
            notify(signals_of(peers, steps) + signal * STRIDE, verdict == 1)
