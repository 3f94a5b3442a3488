"""How the Hopper matmul's producer tells the other partitions which row of the table is next: a ring in shared memory.

A message is the row's number, or LAST. What all partitions must agree on, and none should wait for memory to know, are
bits of it: that a wait was void, and how many of its rectangles of columns a narrow tile lacks.

ring: the messages, and for each place an mbarrier that says it is full, and one that says it is empty.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

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
