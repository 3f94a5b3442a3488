"""Where a tile of the Hopper kernel stores its result and tells so (`kernels/stored.py` says what the words mean)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from overweave.compat.triton_names import reinterpret, store_tile, wait_for_stores_read
from overweave.kernels.hopper.rectangles import place, rectangle
from overweave.kernels.stored import AT_ALL, signals_of
from overweave.memory.device.ptx import READ_SHORT_CLOCK, SLEEP_UNTIL
from overweave.memory.device.signals import STRIDE

CLOCK_ASSEMBLY = gl.constexpr(READ_SHORT_CLOCK)
REST_ASSEMBLY = gl.constexpr(SLEEP_UNTIL)
UNREAD = gl.constexpr(1)  # strips that a store may leave behind


@gluon.jit
def store_parts(target, c_tiles, half, row, col, lacks, SPLIT_N: gl.constexpr):
    """Stores the rectangles of one consumer's half of a tile, those that it has, from shared memory."""
    PART_N: gl.constexpr = c_tiles.first.type.shape[2]
    for part in gl.static_range(SPLIT_N):
        if part == 0 or lacks < SPLIT_N - part:
            store_tile(target, [row, col + part * PART_N], rectangle(c_tiles, half, part, 2))


@gluon.jit
def store_parts_away(target, c_tiles, half, row, col, lacks, pace_ns, SPLIT_N: gl.constexpr):
    """The same at a peer, in small strips, few of them under way and none ahead of its time: loads that are asked for
    behind a store wait until the link has taken that, and the main loop's must not.

    A strip is as wide as a row of shared memory, so that those of a rectangle lie behind each other there.
    """
    PART_N: gl.constexpr = c_tiles.first.type.shape[2]
    STRIP_M: gl.constexpr = target.block_type.shape[0]
    STRIP_N: gl.constexpr = target.block_type.shape[1]
    DOWN: gl.constexpr = c_tiles.first.type.shape[1] // STRIP_M
    STRIPS: gl.constexpr = DOWN * (PART_N // STRIP_N)
    for part in gl.static_range(SPLIT_N):
        tiles, number = place(c_tiles, half, part, 2)
        strips = reinterpret(tiles, tiles.dtype, [tiles.type.shape[0] * STRIPS, STRIP_M, STRIP_N], tiles.type.layout)
        if part == 0 or lacks < SPLIT_N - part:
            due = gl.inline_asm_elementwise(CLOCK_ASSEMBLY, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
            first = number * STRIPS
            for strip in range(STRIPS):
                below, beside = strip % DOWN * STRIP_M, part * PART_N + strip // DOWN * STRIP_N
                store_tile(target, [row + below, col + beside], strips.index(first + strip))
                wait_for_stores_read(UNREAD)
                due += pace_ns
                gl.inline_asm_elementwise(REST_ASSEMBLY, "=r,r", [due], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pace_of(peers, world_size, tile, tiles):
    """How far apart a tile's strips are (runtime/kernel_calls/bind.py); behind the last tiles nobody loads."""
    is_last = tile + gl.num_programs(0) >= tiles
    return gl.where(is_last, 0, gl.load(peers.places + 2 * world_size + 1)).to(gl.int32)


@gluon.jit
def store_parts_at(
    to, own, at_peers, c_tiles, half, row, col, lacks, pace_ns, SPLIT_N: gl.constexpr, PEERS: gl.constexpr
):  # fmt: skip
    """The same by an own tensor map, or by that of the peer where the tile belongs.

    There is a branch for each, as a choice among so many maps takes registers that the warp has not.
    """
    if PEERS == 0 or to <= 0:
        store_parts(own, c_tiles, half, row, col, lacks, SPLIT_N)
    for steps in gl.static_range(1, PEERS + 1):
        if to == steps:
            store_parts_away(at_peers[steps - 1], c_tiles, half, row, col, lacks, pace_ns, SPLIT_N)


@gluon.jit
def store_parts_at_peers(
    at_peers, c_tiles, half, row, col, lacks, pace_ns, SPLIT_N: gl.constexpr, PEERS: gl.constexpr
):  # fmt: skip
    """The same at every peer."""
    for steps in gl.static_range(1, PEERS + 1):
        store_parts_away(at_peers[steps - 1], c_tiles, half, row, col, lacks, pace_ns, SPLIT_N)


@gluon.jit
def announce_everywhere(to, signal, peers, is_sound):
    """Tells the peers of a tile that is stored at every rank."""
    if to == AT_ALL:
        for steps in range(1, peers.everyone):
            gl.atomic_add(signals_of(peers, steps) + signal * STRIDE, 1, mask=is_sound, sem="release", scope="sys")
