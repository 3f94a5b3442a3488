"""The Schedule: which chunks move where, which tiles read and write them, and what must happen before what.

Plain frozen data for every rank at once. It knows nothing of kernels, streams or SMs: a `Plan` (ir/plan.py) adds how.
Everything is stated in global terms, so that a value can be followed through buffers:

- A *tensor* is a logical matrix that no single rank need hold, such as the gathered `a` or the summed product `a@b`.
- `InitialContents` say which part of a tensor a region holds at the start; a `Goal`, what it must hold at the end.
- A product element is a sum over a reduced axis. Its *terms* are the ranges of that axis that were added, in order. A
  range of the global axis names the contributing rank too, since ranks own disjoint ranges.

Operations stand in launch order; `queue` and `waits` say what runs after what (docs/design/0001-schedule.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta, Struct

from overweave.ir.blocks import Blocks
from overweave.ir.dtype import ITEMSIZE_BYTES, Dtype, MovedDtype

LIMIT, LONGEST_DELAY_US = 2**31 - 1, 600_000_000
Index = Annotated[int, Meta(ge=0, le=LIMIT)]
Count = Annotated[int, Meta(ge=1, le=LIMIT)]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_.@+-]*$", max_length=64)]
Range = tuple[Index, Index]  # half-open

INPUT, OUTPUT, SYMMETRIC, LOCAL = "input", "output", "symmetric", "local"
CREDITS: Literal["credits"] = "credits"
ECHOES: Literal["echoes"] = "echoes"


class Buffer(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A matrix `[rows, cols]` that every rank has one instance of.

    home: `input` and `output` belong to the caller and are valid only during the call; `symmetric` lies in the group's
    workspace, where peers may read and write it; `local` lies in the workspace too, for its own rank only. dtype: of
    its elements, where that is not the plan's. blocks: how it lies in memory, where that is not row by row. counted:
    its rows are a block for each rank, sent there or received from there, of which a call fills some (ir/counts.py).
    """

    name: Name
    rows: Index
    cols: Index
    home: Literal["input", "output", "symmetric", "local"]
    dtype: MovedDtype | None = None
    blocks: Blocks | None = None
    counted: Literal["sent", "received"] | None = None

    def itemsize_bytes(self, dtype: Dtype) -> int:
        """Bytes of an element in a plan of `dtype`."""
        return ITEMSIZE_BYTES[self.dtype or dtype]


class Region(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A rectangle of one rank's instance of a buffer: rows `[lo, hi)`, columns `[lo, hi)`. May be empty."""

    buffer: Name
    rank: Index
    rows: Range
    cols: Range

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.cols[1] - self.cols[0]

    @property
    def is_empty(self) -> bool:
        return self.rows[0] >= self.rows[1] or self.cols[0] >= self.cols[1]

    def __str__(self) -> str:
        (r0, r1), (c0, c1) = self.rows, self.cols
        return f"{self.buffer}@{self.rank}[{r0}:{r1},{c0}:{c1}]"


def overlap(one: Region, other: Region) -> bool:
    """Whether two regions share an element."""
    return (
        one.buffer == other.buffer
        and one.rank == other.rank
        and max(one.rows[0], other.rows[0]) < min(one.rows[1], other.rows[1])
        and max(one.cols[0], other.cols[0]) < min(one.cols[1], other.cols[1])
    )


class SignalPad(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """`size` counters on every rank, zero at the start of a call. A wait reads the pad of its own rank."""

    name: Name
    size: Count


class Wait(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Each of the signals `[lo, hi)` of the own rank's pad must reach `count`, its full count in one call."""

    pad: Name
    signals: Range
    count: Count

    def __str__(self) -> str:
        lo, hi = self.signals
        return f"{self.pad}[{lo}:{hi}]>={self.count}"


class Notify(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Adds one, per instance of the operation, to a signal of `rank` when the instance's writes are visible there."""

    pad: Name
    rank: Index
    signal: Index

    def __str__(self) -> str:
        return f"{self.pad}@{self.rank}[{self.signal}]"


class Queue(Struct, frozen=True, forbid_unknown_fields=True):
    """The order in which one rank's operations of this queue run.

    complete: an operation starts after its predecessor has completed (a stream, a copy engine). This is happens-before.
    issue: an operation starts after its predecessor has started (tiles of one persistent kernel). This orders nothing.
    after: queues whose earlier launched operations must all have completed first (stream order of whole kernels).
    """

    name: Name
    order: Literal["complete", "issue"]
    after: tuple[Name, ...] = ()


class _Operation(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind"):
    name: Name
    rank: Index
    queue: Name
    waits: tuple[Wait, ...] = ()
    notifies: tuple[Notify, ...] = ()

    @property
    def instances(self) -> int:
        """Return how many times the operation adds to each signal it notifies: once, or once per tile."""
        return 1

    @property
    def all_waits(self) -> tuple[Wait, ...]:
        """Return the waits before it starts and the late ones."""
        return self.waits


class _Move(_Operation, frozen=True, forbid_unknown_fields=True, kw_only=True):
    sources: tuple[Region, ...]
    destinations: tuple[Region, ...]

    @property
    def reads(self) -> tuple[Region, ...]:
        return self.sources

    @property
    def writes(self) -> tuple[Region, ...]:
        return self.destinations


class Put(_Move, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="put"):
    """Push: each source, on this rank, is written to the destination beside it, on a peer. tiles: how many instances
    move it, each its share of the rows, and signal when that is there."""

    tiles: Count = 1

    @property
    def peer(self) -> int:
        """Return the rank that it pushes to; its own if it pushes nothing."""
        return self.destinations[0].rank if self.destinations else self.rank

    @property
    def instances(self) -> int:
        return self.tiles


class Get(_Move, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="get"):
    """Pull: each source, on a peer, is read into the destination beside it, on this rank."""


class Copy(_Move, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="copy"):
    """Copy within this rank. With no regions it only waits and notifies. delay_us: sleeps this long first, to make a
    rank late on purpose."""

    delay_us: Annotated[int, Meta(ge=0, le=LONGEST_DELAY_US)] = 0


class Clear(_Move, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="clear"):
    """Write zeros to each destination, on this rank."""

    sources: tuple[Region, ...] = ()


class Retire(Copy, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="retire"):
    """End the life of what `regions`, workspace of this rank, hold: later operations of the call may write there again.
    Behind all that wrote and read it; whoever writes there next is behind this. It moves nothing."""

    sources: tuple[Region, ...] = ()
    destinations: tuple[Region, ...] = ()
    regions: tuple[Region, ...]


class ReducePut(Put, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="reduce_put"):
    """Push that adds to the destination. unordered: others may add at the same time, in any order."""

    unordered: bool = False

    @property
    def reads(self) -> tuple[Region, ...]:
        return self.sources + self.destinations


class Compute(_Operation, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="compute"):
    """`out = a @ b`, or `out += a @ b`: adds the reduced range that `a`'s columns and `b`'s rows share.

    addends: `out = addends[0] + ... + a @ b + ...` in fp32, in that order, rounded once; `place` of them stand before
    the product. They may lie on any rank, and are read when the product is computed and `late_waits` are over.
    scales: for each part of `a` a column `[rows, 1]` by which the rows of its product are multiplied, or none at all.
    finishes: with addends, their sum is whole: the problem's epilogue of sums is applied to it before it is rounded.
    Its rows and columns are those of the result.
    copies: on peers, where the result is stored too, in the same rows and columns of one buffer, `out`'s or another;
    `out` may lie on a peer itself.
    tiles: how many instances compute it, each waiting for all of `waits` and notifying when its own part is stored.
    """

    function: Literal["matmul"] = "matmul"
    a: tuple[Region, ...]
    b: Region
    out: tuple[Region, ...]
    accumulate: bool = False
    addends: tuple[Region, ...] = ()
    place: Index = 0
    late_waits: tuple[Wait, ...] = ()
    scales: tuple[Region, ...] = ()
    finishes: bool = False
    copies: tuple[Region, ...] = ()
    tiles: Count = 1

    @property
    def instances(self) -> int:
        return self.tiles

    @property
    def stored_at(self) -> set[int]:
        return {part.rank for part in self.writes}

    @property
    def all_waits(self) -> tuple[Wait, ...]:
        return self.waits + self.late_waits

    @property
    def beside(self) -> tuple[Region, ...]:
        return self.scales + self.addends + self.copies

    @property
    def reads(self) -> tuple[Region, ...]:
        own = (*self.a, self.b, *self.out) if self.accumulate else (*self.a, self.b)
        return own + self.scales + self.addends

    @property
    def writes(self) -> tuple[Region, ...]:
        return self.out + self.copies


class Reduce(_Operation, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="reduce"):
    """`out = operands[0] + operands[1] + ...` in fp32, in that order, rounded once. Operands may lie on any rank.

    A single operand is moved. tiles: how many instances signal, each when its own part is stored; one if none does.
    finishes: as of a Compute.
    """

    operands: tuple[Region, ...]
    out: Region
    finishes: bool = False
    tiles: Count = 1

    @property
    def instances(self) -> int:
        return self.tiles

    @property
    def reads(self) -> tuple[Region, ...]:
        return self.operands

    @property
    def writes(self) -> tuple[Region, ...]:
        return (self.out,)


class Apply(_Operation, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="apply"):
    """Tiles of an author's kernel `function`: they rely on `needs`, and what they write is `makes`.

    The kernel is not analysed: the regions it reads must hold what `needs` says, and those it writes then hold what
    `makes` says. late_needs: regions that are read part by part, each part after its own of `late_waits`. tiles: ranges
    of tile numbers, one instance each.
    """

    function: Name
    needs: tuple[InitialContents, ...] = ()
    late_needs: tuple[InitialContents, ...] = ()
    makes: tuple[Goal, ...]
    late_waits: tuple[Wait, ...] = ()
    tiles: tuple[Range, ...]

    @property
    def instances(self) -> int:
        return sum(hi - lo for lo, hi in self.tiles)

    @property
    def all_waits(self) -> tuple[Wait, ...]:
        return self.waits + self.late_waits

    @property
    def reads(self) -> tuple[Region, ...]:
        return tuple(need.region for need in (*self.needs, *self.late_needs))

    @property
    def writes(self) -> tuple[Region, ...]:
        return tuple(made.region for made in self.makes)


class Collective(_Operation, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="collective"):
    """One rank's part of a collective of NCCL or gloo; the parts of all `ranks` share `label` and complete together.

    all_gather: `sources[0]` of member i lands in `destinations[i]` of every member.
    reduce_scatter: `sources[i]` of every member is summed, in member order, into `destinations[0]` of member i.
    all_reduce: `sources[0]` of all members is summed, in member order, into `destinations[0]` of every member, or into
    itself. Member order is what the terms of Goals name; NCCL's actual order is unspecified.
    all_to_all: `sources[i]` of member j lands in `destinations[j]` of member i. Where blocks are permuted, several
    regions may stand for each of these: one contiguous span of memory, in the same order at its other end.
    finishes: as of a Compute, of the sums of a reduce_scatter or an all_reduce, which NCCL has rounded.
    """

    function: Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
    label: Name
    ranks: tuple[Index, ...]
    sources: tuple[Region, ...]
    destinations: tuple[Region, ...]
    finishes: bool = False

    @property
    def reads(self) -> tuple[Region, ...]:
        return self.sources

    @property
    def writes(self) -> tuple[Region, ...]:
        return self.destinations


Operation = Put | Get | Copy | Retire | Clear | ReducePut | Compute | Reduce | Apply | Collective


class InitialContents(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """At the start, element `[i, j]` of the region is `tensor[row + i, col + j]`."""

    region: Region
    tensor: Name
    row: Index
    col: Index


class Goal(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """At the end, element `[i, j]` of the region is `tensor[row + i, col + j]`, summed over `terms` in that order. No
    terms: the element was moved. unordered: in any order, so that its bits may differ between calls."""

    region: Region
    tensor: Name
    row: Index
    col: Index
    terms: tuple[Range, ...] = ()
    unordered: bool = False


class Credit(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A call of `taker` begins only after `giver` has finished its last call in the same slot."""

    giver: Index
    taker: Index


class Schedule(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Operations of all ranks; `operations` stand in launch order: each rank launches its own in the order they have
    here.

    reuse: why a later call may overwrite memory that this one read. credits: the call's prologue takes the credits, and
    zeroes signals. echoes (acknowledgements): a call has no prologue; calls alternate between two halves of the memory,
    signals are epochs, and in each call every rank gets a signal from every other, whose call before that is then over
    (verify/rules/reuse.py).
    """

    name: Name
    world_size: Count
    buffers: tuple[Buffer, ...]
    pads: tuple[SignalPad, ...] = ()
    queues: tuple[Queue, ...]
    credits: tuple[Credit, ...] = ()
    reuse: Literal["credits", "echoes"] = "credits"
    given: tuple[InitialContents, ...]
    goal: tuple[Goal, ...]
    operations: tuple[Operation, ...]

    def of_rank(self, rank: int) -> Iterator[Operation]:
        """Yield the operations that `rank` launches, in launch order."""
        return (operation for operation in self.operations if operation.rank == rank)

    @property
    def weights(self) -> tuple[str, ...]:
        """Return the buffers by which Computes multiply, in the order of `buffers`."""
        read = {operation.b.buffer for operation in self.operations if isinstance(operation, Compute)}
        return tuple(buffer.name for buffer in self.buffers if buffer.name in read)

    def buffer(self, name: str) -> Buffer:
        """Return the buffer called `name`. Raises KeyError."""
        return {buffer.name: buffer for buffer in self.buffers}[name]

    def pad(self, name: str) -> SignalPad:
        """Return the signal pad called `name`. Raises KeyError."""
        return {pad.name: pad for pad in self.pads}[name]
