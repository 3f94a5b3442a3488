"""What every template fills: moves with holes where compute belongs, and the words all templates share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from msgspec import Struct

from overweave.ir.schedule import (
    CREDITS,
    Buffer,
    Collective,
    Given,
    Goal,
    Notify,
    Operation,
    Queue,
    Range,
    Region,
    SignalPad,
    Wait,
)
from overweave.ir.shards import piece_rows, shard_rows
from overweave.ir.tensors import FACTORS

COMPLETE: Literal["complete"] = "complete"
ISSUE: Literal["issue"] = "issue"

MAIN, COPIES, TILES, SUMS, PACKED = "main", "copies", "tiles", "sums", "packed"  # queues
SCALES = "scales"  # a queue, and the buffer that it fills
PUSHES = f"{COPIES}.kernel"  # the queue of the kernel that moves chunks
X, W, Y = "x", "w", "y"  # the caller's buffers
# Buffers: what tiles write, what arrives of it, sums that are passed on, and whole ones; and what is gathered.
PARTIAL, SLOTS, RUNNING, TOTAL, GATHERED = "partial", "slots", "running", "total", "gathered"
# Pads: it has been brought here; the own tiles have written it; another own step has; a peer's step is complete.
ARRIVED, COMPUTED, SUMMED, TOLD = "arrived", "computed", "summed", "told"
KERNELS = (SUMS, PUSHES, PACKED)  # queues: what one launch runs, in no order
SUMMING = ("reduce_scatter", "all_reduce")  # collectives
A, B = FACTORS  # the tensors of the global matmul

Order = Literal["ring", "all_peers"]
Rotation = Literal["on", "off"]
Mover = Literal["copy_engine", "copy_kernel", "bulk_kernel", "tiles", "bulk_tiles"]
COPYING_KERNELS: tuple[Mover, ...] = (
    "copy_kernel",
    "bulk_kernel",
)  # on SMs of their own: by loads and stores, by bulk copies
CARRYING_TILES: tuple[Mover, ...] = (
    "tiles",
    "bulk_tiles",
)  # the programs that compute, between their tiles: the same two ways
Sums = Literal["kernel", "epilogue"]  # who adds what peers sent: a kernel of its own, or the own tiles


class Chunk(Struct, frozen=True, kw_only=True):
    """A hole in the launch order: here a matmul reads (gather) or writes (scatter) `region`. Never empty.

    rows: the rows of the global matmul that the region holds. `notifies` counts the chunk as one; `compose` counts its
    tiles. places: where tiles store what they write, if not in `region` alone. addends, place, late_waits, scales: as
    in Compute.
    """

    name: str
    rank: int
    rows: Range
    region: Region
    waits: tuple[Wait, ...] = ()
    notifies: tuple[Notify, ...] = ()
    addends: tuple[Region, ...] = ()
    place: int = 0
    late_waits: tuple[Wait, ...] = ()
    places: tuple[Region, ...] = ()
    scales: tuple[Region, ...] = ()


class Communication(Struct, frozen=True, kw_only=True):
    """What moves, and what tiles have to do with it. `steps` stand in launch order.

    tiles_read: whether tiles read the regions of Chunks; else they write them. behind: what must also be written before
    a step begins, which does not read it, by the step's name. pads: of signals that are numbered; none: they are
    derived from what steps read and write (schedules/signals.py). reuse: as in Schedule.
    """

    world_size: int
    buffers: tuple[Buffer, ...]
    queues: tuple[Queue, ...]
    given: tuple[Given, ...]
    goal: tuple[Goal, ...]
    steps: tuple[Operation | Chunk, ...]
    tiles_read: bool = False
    behind: Mapping[str, tuple[Region, ...]] = {}
    pads: tuple[SignalPad, ...] = ()
    reuse: Literal["credits", "echoes"] = CREDITS


class Split(Struct, frozen=True, kw_only=True):
    """How `rows` rows are dealt to ranks, each shard to pieces, and in which order the peers are served.

    ring: one peer after the other, one copy queue. all_peers: a piece for every peer, each peer with its own queue.
    rotation: each rank begins with the peer next to it, so that no two serve one peer at a time. off: all begin with
    rank 0, as a matter of study.
    alignment: pieces begin at multiples of so many rows of their shard, so that tiles need not be cut.
    mover: who carries Puts. A kernel has one queue in either order, and moves `tile_rows` rows at a time.
    is_one_wave: whether all tiles of a rank are computed at once, so that no chunk is there long before the others.
    """

    rows: int
    world_size: int
    order: Order = "ring"
    rotation: Rotation = "on"
    pieces: int = 1
    alignment: int = 1
    mover: Mover = "copy_engine"
    tile_rows: int = 1
    is_one_wave: bool = False

    @property
    def is_by_kernel(self) -> bool:
        """Whether a kernel on SMs of its own carries Puts."""
        return self.mover in COPYING_KERNELS

    @property
    def shard_size(self) -> int:
        """Rows of the longest shard."""
        return -(-self.rows // self.world_size)

    def shard(self, rank: int) -> Range:
        return shard_rows(self.rows, self.world_size, rank)

    def piece(self, rank: int, piece: int) -> Range:
        """Rows of a piece, in the whole."""
        return piece_rows(self.shard(rank), self.pieces, self.alignment)[piece]

    def steps(self) -> Iterator[tuple[int, int]]:
        """(step, piece) in launch order; step 1 to world_size - 1 is the distance to the peer."""
        steps, pieces = range(1, self.world_size), range(self.pieces)
        if self.order == "ring":
            return ((step, piece) for step in steps for piece in pieces)
        return ((step, piece) for piece in pieces for step in steps)

    def peer(self, rank: int, step: int) -> int:
        """Whom a rank serves, or meets, in a step. Negative steps count the other way round."""
        if self.rotation == "off":
            return [peer for peer in range(self.world_size) if peer != rank][abs(step) - 1]
        return (rank + step) % self.world_size

    def peers(self, rank: int) -> list[int]:
        """In ring order, the next rank first."""
        return [(rank + step) % self.world_size for step in range(1, self.world_size)]

    def place(self, sender: int, receiver: int) -> int:
        """Where a sender stands among the peers of a receiver: its own signals leave no gap."""
        return (sender - receiver - 1) % self.world_size

    def in_slot(self, owner: int, source: int, rows: Range) -> Range:
        """Where rows of an owner's shard lie in its slots, of which each source has one as large as a shard."""
        return shifted(rows, source * self.shard_size - self.shard(owner)[0])

    def copy_queue(self, step: int) -> str:
        return COPIES if self.order == "ring" or self.mover != "copy_engine" else f"{COPIES}.{step}"

    def copy_queues(self, after: tuple[str, ...] = ()) -> tuple[Queue, ...]:
        """The queues that carry Puts. after: behind which a kernel that carries them is launched."""
        if self.mover != "copy_engine":
            return (Queue(COPIES, ISSUE, after=after),)
        names = dict.fromkeys(self.copy_queue(step) for step in range(1, self.world_size))
        return tuple(Queue(name, COMPLETE) for name in names)

    def put_tiles(self, rows: int | None = None) -> int:
        """In how many tiles Puts move that have so many rows at most; by default, pieces. The same for all of them, so
        that their arrivals can be waited for as one range."""
        if self.mover == "copy_engine":
            return 1
        if rows is None:
            rows = max(hi - lo for lo, hi in piece_rows(self.shard(0), self.pieces, self.alignment))
        return max(1, -(-rows // self.tile_rows))

    def signal(self, rank: int, piece: int) -> int:
        """The signal of a rank's piece in a pad that has one for each piece of each rank."""
        return rank * self.pieces + piece


def region(buffer: Buffer, rank: int, rows: Range) -> Region:
    """Whole rows of a rank's instance of a buffer."""
    return Region(buffer.name, rank, rows, (0, buffer.cols))


def shifted(rows: Range, by: int) -> Range:
    return rows[0] + by, rows[1] + by


def is_empty(rows: Range) -> bool:
    return rows[0] >= rows[1]


def common(one: Range, other: Range) -> Range:
    """What both have, empty if nothing."""
    return max(one[0], other[0]), min(one[1], other[1])


def united(ascending: Iterable[Range]) -> tuple[Range, ...]:
    """The same rows, ranges that touch or overlap as one. None is empty."""
    found: list[Range] = []
    for lo, hi in ascending:
        if found and lo <= found[-1][1]:
            found[-1] = (found[-1][0], max(hi, found[-1][1]))
        elif lo < hi:
            found.append((lo, hi))
    return tuple(found)


def one(pad: str, signal: int) -> tuple[Wait, ...]:
    """Waits for one signal that is announced once."""
    return (Wait(pad, (signal, signal + 1), 1),)


def all_arrived(split: Split, rank: int) -> tuple[Wait, ...]:
    """The signals of all pieces but the own ones."""
    ranges = (0, split.signal(rank, 0)), (split.signal(rank + 1, 0), split.signal(split.world_size, 0))
    return tuple(Wait(ARRIVED, signals, 1) for signals in ranges if not is_empty(signals))


def gathered_by_library(split: Split, own: Region, whole: Buffer, label: str = "all_gather") -> Collective:
    """A rank's part of a library's all-gather: its own shard, and those of all ranks in `whole`."""
    ranks = tuple(range(split.world_size))
    return Collective(
        name=f"{label}.{own.rank}",
        rank=own.rank,
        queue=MAIN,
        function="all_gather",
        label=label,
        ranks=ranks,
        sources=(own,),
        destinations=tuple(region(whole, own.rank, split.shard(peer)) for peer in ranks),
    )


def queues_of(
    steps: Iterable[Operation | Chunk], *, sums_behind: bool = False, pushes_behind: bool = False
) -> tuple[Queue, ...]:
    """The queues of the steps, but for the tiles' own. Work of the caller's stream runs in launch order, kernels too.

    sums_behind: a kernel that sums is launched behind the tiles; behind a kernel that pushes it always is, as sums that
    wait for peers must not hold the SMs of that. pushes_behind: a kernel that pushes is launched behind the tiles.
    """
    listed = [step for step in steps if not isinstance(step, Chunk) and step.queue != TILES]
    names = dict.fromkeys(step.queue for step in listed)
    # The library's sums hold SMs that kernels may need.
    is_last = any(isinstance(step, Collective) and step.function in SUMMING for step in listed)
    after = {
        MAIN: (TILES, SUMS, PUSHES) if is_last else (TILES,),
        SUMS: (MAIN, TILES, PUSHES) if sums_behind or PUSHES in names else (),
        PUSHES: (MAIN, TILES) if pushes_behind else (),
        PACKED: (MAIN,),
    }
    return tuple(Queue(name, ISSUE if name in KERNELS else COMPLETE, after=after.get(name, ())) for name in names)


def used(buffers: Iterable[Buffer], steps: Iterable[Operation | Chunk]) -> tuple[Buffer, ...]:
    """The buffers that some step names: a group of one moves nothing and needs no workspace."""
    named = {part.buffer for step in steps for part in _regions(step)}
    return tuple(buffer for buffer in buffers if buffer.name in named or buffer.home in ("input", "output"))


def _regions(step: Operation | Chunk) -> tuple[Region, ...]:
    if isinstance(step, Chunk):
        return (step.region, *step.addends, *step.places, *step.scales)
    return (*step.reads, *step.writes)
