"""Steps among ranks as operations: what lies where, and the three ways in which a collective is written.

direct: the library's. template: puts, every rank to the next one first. synth: puts by the ways over a machine's links
that a search finds. A tensor lies in one buffer after the other: the caller's, then one of the workspace for each step,
in which every element has its place in the whole tensor. Signals are derived from what operations read and write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Literal, NamedTuple, get_args

from msgspec.structs import replace

from overweave.errors import InputError
from overweave.hardware.machine import Machine
from overweave.ir.dtype import MovedDtype
from overweave.ir.schedule import (
    Buffer,
    Collective,
    Compute,
    Copy,
    Goal,
    InitialContents,
    Operation,
    Put,
    Queue,
    Range,
    Reduce,
    Region,
    Schedule,
)
from overweave.ir.shards import shard_rows
from overweave.schedules.assemble_schedule import credits
from overweave.schedules.communication import COMPLETE, COPIES, ISSUE, MAIN, TILES, Communication, common
from overweave.schedules.records.record import LoweringPath
from overweave.schedules.signals import with_signals
from overweave.schedules.synthesis.search import gathered, traded

PATHS: tuple[LoweringPath, ...] = get_args(LoweringPath)
MEGABYTE = 1 << 20  # a chunk by which ways are searched: latencies do not decide them

CALLERS = ("input", "output")

BufferHome = Literal["input", "output", "symmetric", "local"]
CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
Members = tuple[int, ...]
Cuboid = tuple[Range, Range, Range]  # of a tensor [batch, rows, cols]
Wanted = Callable[[int], Cuboid]  # of a rank
Side = list[list[tuple[Region, ...]]]
Terms = tuple[Range, ...]
HeldValues = list[
    tuple[Cuboid, Terms]
]  # what a rank has of a tensor: boxes, and the parts of a sum that each holds, in order
MemberHop = tuple[int, int, int]  # from a member of a group, to another one: what the third one owns


class Shape(NamedTuple):
    """A tensor `[batch, rows, cols]` as a matrix: batches one below the other, a column of `width` elements."""

    extents: tuple[int, int, int]
    width: int = 1

    @property
    def matrix(self) -> tuple[int, int]:
        batch, rows, cols = self.extents
        return batch * rows, cols * self.width

    def has_whole(self, box: Cuboid) -> bool:
        """Whether a box has all rows of its batches, which then are one rectangle of the matrix."""
        return box[1] == (0, self.extents[1])

    def rectangles(self, box: Cuboid, is_whole: bool | None = None) -> list[tuple[Range, Range]]:
        """The rows and columns of a box: one rectangle, or one for each batch."""
        (b0, b1), (r0, r1), (c0, c1) = box
        rows, cols = self.extents[1], (c0 * self.width, c1 * self.width)
        if self.has_whole(box) if is_whole is None else is_whole:
            return [((b0 * rows, b1 * rows), cols)]
        return [((batch * rows + r0, batch * rows + r1), cols) for batch in range(b0, b1)]


NOTHING: Cuboid = (0, 0), (0, 0), (0, 0)


class Held(NamedTuple):
    """A tensor at one time: the buffer it lies in, and the values of every rank. own: of a caller's tensor the box that
    each rank has, which lies there from the first row and column on; of others every element has its place in the whole
    tensor."""

    buffer: str
    shape: Shape
    values: list[HeldValues]
    own: list[Cuboid] | None = None

    def box(self, rank: int) -> Cuboid:
        """All that a rank has: its values make up a box; an empty one, if it has none."""
        boxes = [box for box, _ in self.values[rank]] or [NOTHING]
        return _box((min(box[dim][0] for box in boxes), max(box[dim][1] for box in boxes)) for dim in range(3))

    def regions(self, rank: int, box: Cuboid) -> tuple[Region, ...]:
        """Where a rank has a box."""
        shape, is_whole = self.shape, self.shape.has_whole(box)
        if self.own is not None:
            own = self.own[rank]
            box = _box((lo - first, hi - first) for (lo, hi), (first, _) in zip(box, own, strict=True))
            shape = extent_of(own, shape.width)
        return tuple(Region(self.buffer, rank, rows, cols) for rows, cols in shape.rectangles(box, is_whole))

    def parts(self, rank: int, box: Cuboid) -> HeldValues:
        """The values of a rank within a box."""
        found = [(inside(one, box), terms) for one, terms in self.values[rank]]
        return [(one, terms) for one, terms in found if not is_empty(one)]


def _box(ranges: Iterable[Range]) -> Cuboid:
    batch, rows, cols = ranges
    return batch, rows, cols


def extent_of(box: Cuboid, width: int) -> Shape:
    """The shape of a tensor that is a box of another."""
    (b0, b1), (r0, r1), (c0, c1) = box
    return Shape((b1 - b0, r1 - r0, c1 - c0), width)


def inside(one: Cuboid, other: Cuboid) -> Cuboid:
    return _box(common(mine, theirs) for mine, theirs in zip(one, other, strict=True))


def is_empty(box: Cuboid) -> bool:
    return any(lo >= hi for lo, hi in box)


class StepWriter:
    """Writes the operations of all ranks, in launch order.

    path: how collectives are written. machine: whose links are searched. library: the queue of library collectives.
    into: where the result of the next step belongs, if it may lie there at once.
    """

    def __init__(self, name: str, ranks: int, path: LoweringPath, machine: Machine) -> None:
        self.name, self.ranks, self.path, self.machine = name, ranks, path, machine
        self.library: str = MAIN
        self.into: Held | None = None
        self.operations: list[Operation] = []
        self.buffers: dict[str, Buffer] = {}
        self.given: list[InitialContents] = []
        self.goal: list[Goal] = []
        self._numbers = count(1)
        self._adding: set[str] = set()

    def buffer(
        self, name: str, shape: Shape, home: BufferHome, copies: int = 1, dtype: MovedDtype | None = None
    ) -> str:
        """Add a buffer for a tensor, or for so many of them one below the other; return its name."""
        rows, cols = shape.matrix
        self.buffers[name] = Buffer(name, rows * copies, cols, home, dtype)
        return name

    def callers(
        self, name: str, shape: Shape, boxes: Sequence[Cuboid], home: BufferHome, terms: Sequence[Terms] = ()
    ) -> Held:
        """Add a caller's tensor, as large as the largest box of a rank. terms: of the values of each rank."""
        extents = [extent_of(box, shape.width).extents for box in boxes]
        largest = max(one[0] for one in extents), max(one[1] for one in extents), max(one[2] for one in extents)
        self.buffer(name, Shape(largest, shape.width), home)
        values: list[HeldValues] = [[(box, terms[rank] if terms else ())] for rank, box in enumerate(boxes)]
        return Held(name, shape, values, list(boxes))

    def add(self, kind: Callable[..., Operation], rank: int, queue: str, **fields: object) -> None:
        """Add an operation of a rank, if it touches anything."""
        name = f"{getattr(kind, '__name__', 'step').lower()}.{rank}.{len(self.operations)}"
        made = kind(name=name, rank=rank, queue=queue, **fields)
        if not all(part.is_empty for part in (*made.reads, *made.writes)):
            self.operations.append(made)

    def multiply(self, rank: int, a: Region, b: Region, out: tuple[Region, ...], adds: bool = False) -> None:
        """Add a matmul on the caller's stream. adds: to what an earlier one has made there."""
        self.add(Compute, rank, MAIN, a=(a,), b=b, out=out)
        self._adding |= {self.operations[-1].name} if adds else set()

    # Collectives among groups of ranks. Every function returns where the tensor lies behind it.

    def gather(self, held: Held, groups: Sequence[Members]) -> Held:
        """Every member of a group gets the boxes of all."""
        is_direct = self.path == "direct"
        landed = self._landing(held, "gathered", self._united(held, groups), is_direct)
        for group in groups:
            own = [held.box(rank) for rank in group]
            if is_direct:
                sent = [[held.regions(rank, box)] for rank, box in zip(group, own, strict=True)]
                self._by_library(
                    "all_gather", group, sent, [[landed.regions(rank, box) for box in own] for rank in group]
                )
                continue
            self._own(held, landed, zip(group, own, strict=True))
            for source, target, owner in self._hops(group):
                place = held if owner == source else landed
                self._put(place, landed, (group[source], group[target]), own[owner])
        return landed

    def trade(self, held: Held, groups: Sequence[Members], wanted: Wanted) -> Held:
        """Every member gets what others have of the box that it wants."""
        is_direct, group_of = self.path == "direct", _group_of(groups)
        values = [
            [part for each in group_of[rank] for part in held.parts(each, wanted(rank))] for rank in range(self.ranks)
        ]
        landed = self._landing(held, "traded", values, is_direct)
        for group in groups:
            pairs = [[inside(held.box(source), wanted(target)) for target in group] for source in group]
            if is_direct:
                sent = [[held.regions(rank, box) for box in row] for rank, row in zip(group, pairs, strict=True)]
                got = [[landed.regions(rank, row[at]) for row in pairs] for at, rank in enumerate(group)]
                self._by_library("all_to_all", group, sent, got)
                continue
            self._own(held, landed, ((rank, pairs[at][at]) for at, rank in enumerate(group)))
            for source, target in self._served(group):
                self._put(held, landed, (group[source], group[target]), pairs[source][target])
        return landed

    def reduce(self, held: Held, groups: Sequence[Members], wanted: Wanted) -> Held:
        """Every member gets the sum, over its group, of the box that it wants; boxes of a group do not overlap."""
        group_of = _group_of(groups)
        values = [_summed([held.parts(each, wanted(rank)) for each in group_of[rank]]) for rank in range(self.ranks)]
        landed = self._landing(held, "summed", values, True)
        if self.path == "direct":
            for group in groups:
                sent = [[held.regions(rank, wanted(to)) for to in group] for rank in group]
                self._by_library(
                    "reduce_scatter", group, sent, [[landed.regions(rank, wanted(rank))] for rank in group]
                )
            return landed
        slots, running = self._fresh(held, "slots", self.ranks), self._fresh(held, "running")
        for group in groups:
            for owner, rank in enumerate(group):
                tree = _Tree(self, (held, landed), (slots, running), group, wanted(rank))
                values[rank] = tree.sum([hop for hop in self._hops(group) if hop[2] == owner], owner)
        return landed

    def reduce_everywhere(self, held: Held, groups: Sequence[Members]) -> Held:
        """Every member gets the sum, over its group, of all that it has."""
        if self.path == "direct":
            group_of = _group_of(groups)
            values = [_summed([held.values[each] for each in group_of[rank]]) for rank in range(self.ranks)]
            landed = self._landing(held, "summed", values, True)
            for group in groups:
                sides = [[[each.regions(rank, held.box(rank))] for rank in group] for each in (held, landed)]
                self._by_library("all_reduce", group, *sides)
            return landed
        parts = {
            rank: box for group in groups for rank, box in zip(group, _cut(held.box(group[0]), len(group)), strict=True)
        }
        into, self.into = self.into, None
        summed = self.reduce(held, groups, parts.__getitem__)
        self.into = into
        return self.gather(summed, groups)

    # How they are written.

    def _hops(self, group: Members) -> Iterator[MemberHop]:
        """An all-gather among a group, by its members: whose box goes from whom to whom."""
        size = len(group)
        if self.path == "synth":
            yield from ((one.source, one.target, one.chunk) for one in gathered(self.machine, group, 1, MEGABYTE))
        else:
            yield from ((rank, (rank + step) % size, rank) for step in range(1, size) for rank in range(size))

    def _served(self, group: Members) -> Iterator[tuple[int, int]]:
        """An all-to-all among a group: who serves whom."""
        size = len(group)
        if self.path == "synth":
            yield from ((one.source, one.target) for one in traded(self.machine, group, 1, MEGABYTE))
        else:
            yield from ((rank, (rank + step) % size) for step in range(1, size) for rank in range(size))

    def _by_library(self, function: CollectiveKind, group: Members, sources: Side, destinations: Side) -> None:
        """Add a library collective for each rectangle of the boxes that move. Of a side: by member and share, regions.

        Raises InputError for rectangles of unequal widths, which no library takes."""
        label = f"{function}.{next(self._numbers)}"
        cure = "Use path='template', or sizes that ranks divide"
        if any(not any(side) for side in (*sources, *destinations)):
            raise InputError(f"path='direct' of an {function}", "a rank has nothing to send, or to receive", cure)
        widths = {part.shape[1] for side in (*sources, *destinations) for regions in side for part in regions}
        if len(widths) > 1:
            raise InputError(f"path='direct' of an {function}", f"shares of {sorted(widths)} columns", cure)
        for at in range(max(len(regions) for side in (*sources, *destinations) for regions in side)):
            for rank, sent, got in zip(group, sources, destinations, strict=True):
                made = Collective(
                    name=f"{label}.{rank}.{at}",
                    rank=rank,
                    queue=self.library,
                    function=function,
                    label=f"{label}.{group[0]}.{at}",
                    ranks=tuple(group),
                    sources=_nth(sent, at),
                    destinations=_nth(got, at),
                )
                self.operations.append(made)

    def _put(self, source: Held, target: Held, ranks: tuple[int, int], box: Cuboid) -> None:
        sent, got = source.regions(ranks[0], box), target.regions(ranks[1], box)
        self.add(Put, ranks[0], COPIES, sources=sent, destinations=got)

    def _own(self, held: Held, landed: Held, boxes: Iterable[tuple[int, Cuboid]]) -> None:
        """Place what ranks have already beside what arrives."""
        for rank, box in boxes:
            self.add(Copy, rank, MAIN, sources=held.regions(rank, box), destinations=landed.regions(rank, box))

    def _united(self, held: Held, groups: Sequence[Members]) -> list[HeldValues]:
        group_of = _group_of(groups)
        return [[value for each in group_of[rank] for value in held.values[each]] for rank in range(self.ranks)]

    def _landing(self, held: Held, what: str, values: list[HeldValues], is_own: bool) -> Held:
        """Where a tensor lies behind a step. is_own: ranks write it themselves, so that it may be the caller's."""
        if self.into is not None and is_own and self.buffers[held.buffer].dtype is None:
            return self.into._replace(values=values)
        return Held(self._fresh(held, what), held.shape, values)

    def _fresh(self, held: Held, what: str, copies: int = 1) -> str:
        name = f"{held.buffer.partition('.')[0]}.{what}{next(self._numbers)}"
        return self.buffer(name, held.shape, "symmetric", copies, self.buffers[held.buffer].dtype)

    # The schedule.

    def finish(self, held: Held, target: Held) -> None:
        """Move what ranks have to where the caller wants it, if it is not there."""
        for rank in range(self.ranks) if held.buffer != target.buffer else ():
            box = inside(held.box(rank), target.box(rank))
            sources, destinations = held.regions(rank, box), target.regions(rank, box)
            if self.buffers[held.buffer].dtype is None:
                self.add(Copy, rank, MAIN, sources=sources, destinations=destinations)
                continue
            for source, out in zip(sources, destinations, strict=True):
                self.add(Reduce, rank, MAIN, operands=(source,), out=out)  # rounds

    def schedule(self) -> Schedule:
        """Return all operations, with their signals. Raises ScheduleError."""
        used = dict.fromkeys(operation.queue for operation in self.operations)
        streams = {MAIN: TILES, TILES: MAIN}  # all work of the caller's stream runs in launch order
        after = {name: (other,) for name, other in streams.items() if other in used}
        queues = [Queue(name, ISSUE if name == TILES else COMPLETE, after=after.get(name, ())) for name in used]
        touched = {part.buffer for operation in self.operations for part in (*operation.reads, *operation.writes)}
        made = with_signals(
            Communication(
                world_size=self.ranks,
                buffers=tuple(each for each in self.buffers.values() if each.name in touched or each.home in CALLERS),
                queues=tuple(queues),
                given=tuple(self.given),
                goal=tuple(self.goal),
                steps=tuple(self.operations),
            )
        )
        return Schedule(
            name=self.name,
            world_size=self.ranks,
            buffers=_homes(made),
            pads=made.pads,
            queues=made.queues,
            credits=credits(self.ranks, made.buffers, made.pads),
            given=made.given,
            goal=made.goal,
            operations=tuple(self._finished(step) for step in made.steps),  # type: ignore[arg-type]  # no chunks
        )

    def _finished(self, step: Operation) -> Operation:
        """Return a matmul that adds as such. It waits for no earlier one: the stream completes them in order."""
        return replace(step, accumulate=True) if isinstance(step, Compute) and step.name in self._adding else step


class _Tree:
    """Sums of one box that travel to its owner, by the ways that the box would take from it, backwards.

    of: the tensor, and where sums lie at their owner. places: buffers of what arrives, and of sums on the way.
    """

    def __init__(
        self, writer: StepWriter, of: tuple[Held, Held], places: tuple[str, str], group: Members, box: Cuboid
    ) -> None:
        self.writer, (self.held, self.landed), (self.slots, self.running) = writer, of, places
        self.group, self.box = group, box

    def sum(self, hops: Iterable[MemberHop], owner: int) -> HeldValues:
        """Add the operations; return the owner's values."""
        self.below: dict[int, list[int]] = {}
        for parent, child, _ in hops:
            self.below.setdefault(parent, []).append(child)
        return self._value(owner, owner)[1]

    def _value(self, member: int, owner: int) -> tuple[tuple[Region, ...], HeldValues]:
        """Where the sum of all below a member lies, and what it holds."""
        rank, held = self.group[member], self.held
        parts = {member: (held.regions(rank, self.box), held.parts(rank, self.box))}
        for child in self.below.get(member, ()):
            source, values = self._value(child, owner)
            slot = self._place(self.slots, rank, self.group[child] * held.shape.matrix[0])
            self.writer.add(Put, self.group[child], f"{COPIES}.sums", sources=source, destinations=slot)
            parts[child] = slot, values
        if len(parts) == 1 and member != owner:
            return parts[member]
        out = self.landed.regions(rank, self.box) if member == owner else self._place(self.running, rank)
        ordered = [parts[child] for child in sorted(parts)]
        for at, region in enumerate(out):
            self.writer.add(Reduce, rank, MAIN, operands=tuple(part[0][at] for part in ordered), out=region)
        return out, _summed([values for _, values in ordered])

    def _place(self, buffer: str, rank: int, below: int = 0) -> tuple[Region, ...]:
        found = self.held.shape.rectangles(self.box)
        return tuple(Region(buffer, rank, (rows[0] + below, rows[1] + below), cols) for rows, cols in found)


def _homes(made: Communication) -> tuple[Buffer, ...]:
    """Buffers of the workspace that no peer touches are local."""
    reached = {part.buffer for step in made.steps for part in (*step.reads, *step.writes) if part.rank != step.rank}  # type: ignore[union-attr]
    return tuple(
        replace(each, home="local") if each.home not in CALLERS and each.name not in reached else each
        for each in made.buffers
    )


def _group_of(groups: Iterable[Members]) -> dict[int, Members]:
    return {rank: group for group in groups for rank in group}


def _nth(shares: list[tuple[Region, ...]], at: int) -> tuple[Region, ...]:
    """The rectangle of each share with this number; no rows of it where a share has fewer."""
    like = next(one[0] for one in shares if one)
    return tuple(one[at] if at < len(one) else Region(like.buffer, like.rank, (0, 0), like.cols) for one in shares)


def _cut(box: Cuboid, parts: int) -> list[Cuboid]:
    """A box in so many parts: by rows if it has enough of them, else by columns or batches."""
    dim = max((1, 2, 0), key=lambda at: min(parts, box[at][1] - box[at][0]))
    lo, hi = box[dim]
    cuts = (shard_rows(hi - lo, parts, index) for index in range(parts))
    return [_box((*box[:dim], (lo + first, lo + last), *box[dim + 1 :])) for first, last in cuts]


def _summed(parts: Sequence[HeldValues]) -> HeldValues:
    """The sum of values of one box, in this order, cut where any of them is."""
    found = parts[0]
    for more in parts[1:]:
        found = [
            (both, (*terms, *others))
            for box, terms in found
            for other, others in more
            if not is_empty(both := inside(box, other))
        ]
    return found
