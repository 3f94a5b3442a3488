"""The communication of one operator: its moves, with a placeholder wherever the matmul reads or writes a chunk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from overweave.errors import ScheduleError
from overweave.ir.schedule import (
    CREDITS,
    ECHOES,
    OUTPUT,
    Buffer,
    Collective,
    Goal,
    InitialContents,
    Notify,
    Operation,
    Put,
    Queue,
    Range,
    Region,
    SignalPad,
    Wait,
    overlap,
)
from overweave.ir.shards import piece_rows, shard_rows
from overweave.ir.tensors import FACTORS

COMPLETE: Literal["complete"] = "complete"
ISSUE: Literal["issue"] = "issue"

MAIN, COPIES, TILES, SUMS, PACKED = "main", "copies", "tiles", "sums", "packed"  # queues
SCALES = "scales"  # a queue, and the buffer that it fills
# Queues beside cuBLAS matmuls: copies of own pieces among those that arrive, collectives, copies to the result.
GATHERS, EXCHANGES, SCATTERS = "gathers", "exchanges", "scatters"
PUSHES = f"{COPIES}.kernel"  # the queue of the kernel that moves chunks
X, W, Y = "x", "w", "y"  # the caller's buffers
# Buffers: partials that tiles write, partials that arrive, running sums, complete sums, gathered rows.
PARTIAL, SLOTS, RUNNING, TOTAL, GATHERED = "partial", "slots", "running", "total", "gathered"
STAGED = "staged"  # partials that tiles write block by block; the buffer of their sums has the name of the pad
# Signal pads: data arrived here; own tiles wrote it; another own step wrote it; a step of a peer is complete.
ARRIVED, COMPUTED, SUMMED, TOLD = "arrived", "computed", "summed", "told"
KERNELS = (SUMS, PUSHES, PACKED)  # queues that one kernel launch runs, in no order
SUMMING = ("reduce_scatter", "all_reduce")  # collectives
A, B = FACTORS  # the tensors of the global matmul

Order = Literal["ring", "all_peers"]
Rotation = Literal["on", "off"]
Mover = Literal["copy_engine", "copy_kernel", "bulk_kernel", "tiles", "bulk_tiles", "library"]
COPYING_KERNELS: tuple[Mover, ...] = (
    "copy_kernel",
    "bulk_kernel",
)  # on SMs of their own: by loads and stores, by bulk copies
CARRYING_TILES: tuple[Mover, ...] = (
    "tiles",
    "bulk_tiles",
)  # the programs that compute, between their tiles: the same two ways
SumEngine = Literal["kernel", "epilogue"]  # who adds what peers sent: a kernel of its own, or the own tiles


class MatmulChunk(Struct, frozen=True, kw_only=True):
    """A placeholder in the launch order: here the matmul reads (gather) or writes (scatter) `region`. Never empty.

    rows: the rows of the global matmul that the region holds. `notifies` counts the chunk as one; `compose` counts its
    tiles. weight_cols: columns of the weight, if not all are multiplied. places: where tiles store what they write, if
    not in `region` alone. addends, place, late_waits, scales: as in Compute.

    Of a gather: cols: the range of the reduced axis that the region holds; None: all of it. into: where the product by
    each weight is stored; none: at `rows` of each result. adds: it is added to what lies there.
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
    weight_cols: Range | None = None
    cols: Range | None = None
    into: tuple[Region, ...] = ()
    adds: bool = False

    @property
    def reads(self) -> tuple[Region, ...]:
        """Of a gather: what its tiles wait for before they multiply."""
        return (self.region, *self.scales)


ReducedPart = tuple[
    Range, tuple[Range, ...]
]  # rows of a product, and the ranges of the reduced axis that are added, in order


class Communication(Struct, frozen=True, kw_only=True):
    """All steps of a call in launch order, with the queues and buffers that they use.

    tiles_read: whether tiles read the regions of MatmulChunks; else they write them. behind: step's name -> regions
    that must be written before it starts though it does not read them. pads: of the signals, which are derived from
    what steps read and write (schedules/signals.py). reuse: as in Schedule. parts: of each rank, rows of its product
    that are sums of products of cuts along the reduced axis; a rank without any has one product of the whole axis.
    """

    world_size: int
    buffers: tuple[Buffer, ...]
    queues: tuple[Queue, ...]
    given: tuple[InitialContents, ...]
    goal: tuple[Goal, ...]
    steps: tuple[Operation | MatmulChunk, ...]
    tiles_read: bool = False
    behind: Mapping[str, tuple[Region, ...]] = {}
    pads: tuple[SignalPad, ...] = ()
    reuse: Literal["credits", "echoes"] = CREDITS
    parts: Mapping[int, tuple[ReducedPart, ...]] = {}


class Split(Struct, frozen=True, kw_only=True):
    """How `rows` rows are cut into shards, each shard into pieces, and in which order a rank serves its peers.

    ring: one peer after the other, one copy queue. all_peers: a piece for every peer, each peer with its own queue.
    rotation: each rank begins with the peer next to it, so that no two serve one peer at a time. off: all begin with
    rank 0, as a matter of study.
    alignment: pieces begin at multiples of so many rows of their shard, so that tiles need not be cut.
    mover: the engine that runs Puts. A kernel has one queue in either order, and moves `tile_rows` rows at a time.
    is_one_wave: whether all tiles of a rank are computed at once, so that no chunk is there long before the others.
    only: the ranks whose operations are written; (): all. Nothing but collectives may join them to others.
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
    only: tuple[int, ...] = ()

    @property
    def ranks(self) -> Sequence[int]:
        """Return the ranks whose operations are written."""
        return self.only or range(self.world_size)

    @property
    def shard_size(self) -> int:
        """Rows of the longest shard."""
        return -(-self.rows // self.world_size)

    def shard(self, rank: int) -> Range:
        return shard_rows(self.rows, self.world_size, rank)

    def piece_of(self, rank: int, piece: int) -> Range:
        """Return the rows of a piece, counted in the whole tensor."""
        return piece_rows(self.shard(rank), self.pieces, self.alignment)[piece]

    def peer(self, rank: int, step: int) -> int:
        """Return the peer of a rank in a step. Negative steps count the other way round."""
        if self.rotation == "off":
            return [peer for peer in range(self.world_size) if peer != rank][abs(step) - 1]
        return (rank + step) % self.world_size

    def peers(self, rank: int) -> list[int]:
        """Return all peers in ring order, the next rank first."""
        return [(rank + step) % self.world_size for step in range(1, self.world_size)]


def region(buffer: Buffer, rank: int, rows: Range) -> Region:
    """Return whole rows of a rank's instance of a buffer."""
    return Region(buffer.name, rank, rows, (0, buffer.cols))


def shifted(rows: Range, by: int) -> Range:
    return rows[0] + by, rows[1] + by


def is_empty(rows: Range) -> bool:
    return rows[0] >= rows[1]


def common(one: Range, other: Range) -> Range:
    return max(one[0], other[0]), min(one[1], other[1])


def united(ascending: Iterable[Range]) -> tuple[Range, ...]:
    """Return the union of ranges, those that touch or overlap as one, without empty ones."""
    union: list[Range] = []
    for lo, hi in ascending:
        if union and lo <= union[-1][1]:
            union[-1] = (union[-1][0], max(hi, union[-1][1]))
        elif lo < hi:
            union.append((lo, hi))
    return tuple(union)


def gathered_by_library(split: Split, own: Region, whole: Buffer, label: str = "all_gather") -> Collective:
    """Return a rank's part of an NCCL all-gather of all shards into `whole`."""
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


def communicated(
    world_size: int,
    steps: Sequence[Operation | MatmulChunk],
    callers: Sequence[Buffer],
    *,
    given: Iterable[InitialContents] = (),
    goal: Iterable[Goal] = (),
    tiles_read: bool = False,
    has_messages: bool = False,
) -> Communication:
    """Return a communication of the steps, with their queues and the workspace buffers that they name.

    callers: the caller's buffers. has_messages: rows move as packed messages, though a group of one has no steps.
    """
    queues = queues_of(steps)
    if has_messages and not steps:
        queues = (Queue(PACKED, ISSUE, after=(MAIN,)),)
    return Communication(
        world_size=world_size,
        buffers=(*callers, *_workspace(steps, {buffer.name for buffer in callers})),
        queues=queues,
        given=tuple(given),
        goal=tuple(goal),
        steps=tuple(steps),
        tiles_read=tiles_read,
        reuse=ECHOES if any(queue.name == PACKED for queue in queues) else CREDITS,
    )


def queues_of(
    steps: Iterable[Operation | MatmulChunk], *, sums_behind: bool = False, pushes_behind: bool = False
) -> tuple[Queue, ...]:
    """Return the queues of the steps, without that of the tiles. The caller's stream runs its work in launch order.

    sums_behind: the reduction kernel is launched behind the tiles. It is always launched behind a kernel that pushes:
    sums that wait for peers must not hold the SMs that the pushes need. pushes_behind: the kernel that pushes is
    launched behind the tiles.
    """
    queued = [step for step in steps if not isinstance(step, MatmulChunk) and step.queue != TILES]
    names = dict.fromkeys(step.queue for step in queued)
    # NCCL's reductions hold SMs that kernels may need.
    is_last = any(isinstance(step, Collective) and step.function in SUMMING for step in queued)
    after = {
        MAIN: (TILES, SUMS, PUSHES) if is_last else (TILES,),
        SUMS: (MAIN, TILES, PUSHES) if sums_behind or PUSHES in names else (),
        PUSHES: (MAIN, TILES) if pushes_behind else (),
        PACKED: (MAIN, TILES),
    }
    return tuple(Queue(name, ISSUE if name in KERNELS else COMPLETE, after=after.get(name, ())) for name in names)


def in_parts(made: Communication, rows_of: Mapping[str, int]) -> Communication:
    """Cut all Puts of a kernel's queue into as many parts as the longest one needs: then their signals count alike, and
    one range waits for several. rows_of: queue -> the rows of a part.
    """
    puts = [step for step in made.steps if isinstance(step, Put) and step.queue in rows_of]
    longest: dict[str, int] = {}
    for put in puts:
        longest[put.queue] = max(longest.get(put.queue, 0), *(part.shape[0] for part in put.sources))
    parts = {queue: max(1, -(-rows // rows_of[queue])) for queue, rows in longest.items()}
    moved = {put.name: replace(put, tiles=parts[put.queue]) for put in puts}
    return replace(made, steps=tuple(moved.get(step.name, step) for step in made.steps)) if moved else made


def _workspace(steps: Iterable[Operation | MatmulChunk], callers: set[str]) -> Iterator[Buffer]:
    """Yield the buffers that steps name beside the caller's; those that peers touch are symmetric."""
    sizes: dict[str, tuple[int, int]] = {}
    reached: set[str] = set()
    for step in steps:
        for part in _regions(step):
            if part.buffer not in callers:
                rows, cols = sizes.get(part.buffer, (0, 0))
                sizes[part.buffer] = max(rows, part.rows[1]), max(cols, part.cols[1])
                if part.rank != step.rank:
                    reached.add(part.buffer)
    for name, (rows, cols) in sizes.items():
        yield Buffer(name, rows, cols, "symmetric" if name in reached else "local")


def used(buffers: Iterable[Buffer], steps: Iterable[Operation | MatmulChunk]) -> tuple[Buffer, ...]:
    """Return the caller's buffers, and the others that a step names: a group of one needs no workspace."""
    named = {part.buffer for step in steps for part in _regions(step)}
    return tuple(buffer for buffer in buffers if buffer.name in named or buffer.home in ("input", "output"))


def _regions(step: Operation | MatmulChunk) -> tuple[Region, ...]:
    if isinstance(step, MatmulChunk):
        return (*step.reads, *step.addends, *step.places, *step.into)
    return (*step.reads, *step.writes)


# Tiles that store what they compute where it is needed: at a peer, whom they tell, instead of a Put that follows them.
#
# A template writes a chunk here and puts it to its peers. Where nobody else waits for the chunk the tiles may store it
# there themselves.
# SOURCE: Flux (arXiv 2406.06858) 4.1 (stores to the peer in the epilogue); AutoOverlap 5 (co-located SMs).


class _Read(NamedTuple):
    """A step that is no tiles', and a part of what it reads."""

    step: Operation
    part: Region


def stored_at_peers(made: Communication) -> Communication:
    """The same, without the Puts in the tiles' queue: the tiles that write what these carry store it there.

    A tile stores here, too, what is the caller's or what its own rank reads. Raises ScheduleError for a Put of more, or
    less, than some tiles write, or of what others wait for.
    """
    named = {step.name for step in made.steps if isinstance(step, Put) and step.queue == TILES}
    if not named:
        return made
    behind_tiles = {queue.name for queue in made.queues if TILES in queue.after}
    callers = {buffer.name for buffer in made.buffers if buffer.home == OUTPUT}
    reads: dict[tuple[str, int], list[_Read]] = {}
    for read in (_Read(step, part) for step in made.steps if not isinstance(step, MatmulChunk) for part in step.reads):
        reads.setdefault((read.part.buffer, read.part.rank), []).append(read)
    gone: set[str] = set()
    steps: list[Operation | MatmulChunk] = []
    for step in made.steps:
        if isinstance(step, MatmulChunk):
            own = step.region
            readers = [one for one in reads.get((own.buffer, own.rank), ()) if overlap(one.part, own)]
            puts = [one.step for one in readers if isinstance(one.step, Put)]
            rest = [one.step for one in readers if one.step not in puts]
            is_carried = all(put.name in named and put.sources == (own,) for put in puts)
            if puts and is_carried and all(other.queue in behind_tiles for other in rest):
                gone.update(put.name for put in puts)
                here = (own,) if rest or own.buffer in callers else ()
                step = replace(step, places=(*here, *(to for put in puts for to in put.destinations)))
        steps.append(step)
    if left_over := sorted(named - gone):
        found = "others read what it carries too, or it is not just what some tiles announce as one"
        raise ScheduleError(f"let tiles carry {left_over[0]}", found, "Use mover=copy_engine, or another chunk")
    return replace(made, steps=tuple(step for step in steps if step.name not in gone)) if gone else made
