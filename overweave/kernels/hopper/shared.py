"""What the partitions of the Hopper matmul share: a tuple for each subject, None where a kernel has none of it."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

# A message is the row's number, or LAST. What all partitions must agree on, and none should wait for memory to know,
# are bits of it: that a wait was void, and how many of its rectangles of columns a narrow tile lacks.
#
# ring: the messages, and for each place an mbarrier that says it is full, and one that says it is empty.

# Nobody is more than two tiles ahead of another: who computes waits for what is loaded, and for the last result to be
# stored. More messages would only be more mbarriers, which a program makes before it begins.
RING = gl.constexpr(2)
VOID, LACKS = gl.constexpr(1 << 30), gl.constexpr(1 << 27)
NUMBER = gl.constexpr((1 << 27) - 1)
LAST = gl.constexpr(-1)


@gluon.jit
def lacking(message):
    """How many rectangles of columns the tile is short of a whole one: 0 to 7."""
    return (message // LACKS) & 7


@gluon.jit
def pass_on(ring, turn, message):
    """Producer: the next row of the table for the other partitions."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    place = turn % RING
    mbarrier.wait(ring.empty.index(place), ((turn // RING) & 1) ^ 1)
    ring.messages.index(place).store(gl.full([1], message, gl.int32, layout))
    mbarrier.arrive(ring.full.index(place), count=1)


@gluon.jit
def receive(ring, turn):
    """The other partitions: the next row of the table, or LAST."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    place = turn % RING
    mbarrier.wait(ring.full.index(place), (turn // RING) & 1)
    message = gl.max(ring.messages.index(place).load(layout), 0)
    mbarrier.arrive(ring.empty.index(place), count=1)
    return message


class Claim(NamedTuple):
    """Where the first claim of a program is passed on (start.py), and the mbarrier that says so."""

    place: Any
    passed: Any


class Ring(NamedTuple):
    """Which row of the table is next (ring.py): messages, and mbarriers that say which are full and empty."""

    messages: Any
    full: Any
    empty: Any


class Stages(NamedTuple):
    """Tiles of the operands in shared memory, and mbarriers that say which stages are full and empty."""

    a: Any
    b: Any
    full: Any
    empty: Any


class StagedResults(NamedTuple):
    """What consumers leave to the storer, and mbarriers that say which of the two halves are full and empty."""

    tiles: Any
    full: Any
    empty: Any


class ReductionArgs(NamedTuple):
    """What tiles add (received.py): a table of addends, or the tensor map of single ones; the storer's verdict
    on them, and its mbarrier.
    """

    addends: Any
    tiles: Any
    verdicts: Any
    received: Any


class TileArgs(NamedTuple):
    """What all partitions but the producer need. products, ends, peers, experts, queue: kernels/arguments.py."""

    products: Any
    ends: Any
    sums: ReductionArgs
    peers: Any
    experts: Any
    queue: Any
    k: Any
