"""What the warp-specialised partitions of the Hopper matmul share: one tuple a subject; unused ones are None."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

# The producer sends each claimed tile to the other partitions as one int32 message: the tile's row of the table, or
# LAST. Bits above it carry what all partitions must agree on without reading memory: VOID_BIT, the tile's wait failed;
# and how many of the tile's TMA boxes of columns are missing (a narrow tile), in units of MISSING_UNIT. The queue is a
# ring of QUEUE_LENGTH messages, each with a full and an empty mbarrier. Two suffice: no partition is more than two
# tiles ahead of another, since consumers wait for loads, and for the last result to be stored.
QUEUE_LENGTH = gl.constexpr(2)
VOID_BIT, MISSING_UNIT = gl.constexpr(1 << 30), gl.constexpr(1 << 27)
TILE_MASK = gl.constexpr((1 << 27) - 1)
LAST = gl.constexpr(-1)


@gluon.jit
def missing_parts(message):
    """Return how many TMA boxes of columns a message's tile has fewer than a whole tile: 0 to 7."""
    return (message // MISSING_UNIT) & 7


@gluon.jit
def send_message(queue, iteration, message):
    """Producer: send message number `iteration` to the other partitions, once all have read the one it replaces."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    index = iteration % QUEUE_LENGTH
    mbarrier.wait(queue.empty.index(index), ((iteration // QUEUE_LENGTH) & 1) ^ 1)
    queue.messages.index(index).store(gl.full([1], message, gl.int32, layout))
    mbarrier.arrive(queue.full.index(index), count=1)


@gluon.jit
def receive_message(queue, iteration):
    """Other partitions: wait for message number `iteration` and return it."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    index = iteration % QUEUE_LENGTH
    mbarrier.wait(queue.full.index(index), (iteration // QUEUE_LENGTH) & 1)
    message = gl.max(queue.messages.index(index).load(layout), 0)
    mbarrier.arrive(queue.empty.index(index), count=1)
    return message


class FirstClaim(NamedTuple):
    """The shared-memory slot by which the first claim is passed on (start.py), and its mbarrier."""

    slot: Any
    sent: Any


class MessageQueue(NamedTuple):
    """The ring of messages, and the full and empty mbarriers of each."""

    messages: Any
    full: Any
    empty: Any


class Stages(NamedTuple):
    """The pipeline stages: tiles of a and b in shared memory, and a full and an empty mbarrier for each stage."""

    a: Any
    b: Any
    full: Any
    empty: Any


class StagedResults(NamedTuple):
    """Result tiles that consumers store in shared memory for the storer; full and empty mbarriers of each consumer."""

    tiles: Any
    full: Any
    empty: Any


class ReductionArgs(NamedTuple):
    """Addends of tiles (tile_end.py). addends: base pointers or row shifts; tiles: tensor map of single addends.

    verdicts: shared memory for the status of the storer's wait for them; received: its mbarrier.
    """

    addends: Any
    tiles: Any
    verdicts: Any
    received: Any


class TileArgs(NamedTuple):
    """Arguments of all partitions but the producer, as in kernels/arguments.py."""

    outputs: Any
    epilogue_args: Any
    sums: ReductionArgs
    peers: Any
    experts: Any
    queue: Any
    k: Any
