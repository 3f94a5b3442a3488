"""The labelled memory of the interleaving run: elements of all buffers of all ranks, and what operations do to them.

A value is a number that stands for a label: an element of a given tensor in one call, or a sum of products, told as the
pairs of elements multiplied, in the order in which they were added; or such a sum, finished beside an element of the
result.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import NamedTuple

from msgspec.structs import replace

from overweave.ir.schedule import (
    Buffer,
    Clear,
    Collective,
    Compute,
    Copy,
    Get,
    Operation,
    Put,
    Range,
    Reduce,
    ReducePut,
    Region,
    Retire,
    Schedule,
)

# Where the elements of permuted blocks lie, as the judge of verify sees it, sharing no code with it.


class Malformed(Exception):
    """There is nothing to run: a name, a rank, an index or a shape makes no sense."""


def positions_of(buffer: Buffer) -> list[list[int]]:
    """By row and column, how far each element lies from the buffer's first. Two may share a place."""
    blocks = buffer.blocks
    if blocks is None:
        return [list(range(row * buffer.cols, (row + 1) * buffer.cols)) for row in range(buffer.rows)]
    tops = list(blocks.tops or range(0, buffer.rows, blocks.rows))
    wide = -(-buffer.cols // blocks.cols)
    positions: list[list[int]] = []
    for row in range(buffer.rows):
        above = [top for top in tops if top <= row]
        if not above or row - above[-1] >= blocks.rows:
            raise Malformed(f"row {row} of {buffer.name} is in no block")
        first = (len(above) - 1) * wide
        cells = [place_of(buffer, first + col // blocks.cols) for col in range(buffer.cols)]
        positions.append(
            [(cell * blocks.rows + row - above[-1]) * blocks.cols + col % blocks.cols for col, cell in enumerate(cells)]
        )
    return positions


def place_of(buffer: Buffer, block: int) -> int:
    places = buffer.blocks.places if buffer.blocks else ()
    if not (block < len(places) and 0 <= places[block] < len(places)):
        raise Malformed(f"block {block} of {buffer.name} has no cell")
    return places[block]


def extent_of(buffer: Buffer) -> int:
    """Elements that a buffer takes, padding too."""
    blocks = buffer.blocks
    return len(blocks.places) * blocks.rows * blocks.cols if blocks else buffer.rows * buffer.cols


def moved_by(buffer: Buffer, region: Region) -> list[int]:
    """The elements of a buffer's memory that a library's call takes for a region, with padding: of a block of which it
    has whole rows from the first on, or down to the last, all to the end of the cell."""
    blocks, positions, (left, right) = buffer.blocks, positions_of(buffer), region.cols
    named = [row[left:right] for row in positions[slice(*region.rows)]]
    if blocks is None or not named or left == right:
        return [position for row in named for position in row]
    tops = list(blocks.tops or range(0, buffer.rows, blocks.rows))
    found: list[int] = []
    for top, end in zip(tops, [*tops[1:], buffer.rows], strict=True):
        first, last = max(top, region.rows[0]), min(end, region.rows[1])
        for lo in range(0, buffer.cols, blocks.cols) if first < last else ():
            low, high = max(lo, left), min(lo + blocks.cols, buffer.cols, right)
            is_wide = (low, high) == (lo, min(lo + blocks.cols, buffer.cols))
            if low < high and is_wide:
                start = positions[first][low]
                is_to_end = first == top or last == end
                rows = blocks.rows - (first - top) if is_to_end else last - first
                found += range(start, start + rows * blocks.cols)
            elif low < high:
                found += [position for row in positions[first:last] for position in row[low:high]]
    return found


def stretch_of(buffers: dict[str, Buffer], regions: tuple[Region, ...], rank: int) -> tuple[str, range]:
    """The one stretch of a buffer's memory that a call takes for regions. Raises Malformed if it is none."""
    if len({region.buffer for region in regions}) != 1 or any(region.rank != rank for region in regions):
        raise Malformed("a call takes one buffer of its rank at a side")
    buffer = buffers[regions[0].buffer]
    moved = sorted(position for region in regions for position in moved_by(buffer, region))
    if not moved or moved != list(range(moved[0], moved[-1] + 1)):
        raise Malformed("a call takes one stretch of memory at a side")
    return buffer.name, range(moved[0], moved[-1] + 1)


# Calls whose counts fill blocks of rows in part, as the judge of verify sees them, sharing no code with it.
# A counted buffer has a block of rows for each rank. The rows that a call fills lie one behind the other from the
# first row of the buffer on. Whoever moves rows of it moves those that are there, and beside them, of a buffer that
# is not counted, as many from the region's first row on.

Counts = tuple[tuple[int, ...], ...]  # by source and target
PAIRS = 6


def pairs_of_counts(schedule: Schedule) -> list[tuple[Counts, Counts]]:
    """Counts of two calls in turn: as many pairs as tell most mistakes; one of none where no buffer is counted."""
    size = schedule.world_size
    most = max((buffer.rows // size for buffer in schedule.buffers if buffer.counted), default=0)
    if not any(buffer.counted for buffer in schedule.buffers):
        return [((), ())]
    rng = Random(f"{size} {most}")

    def drawn(few: bool) -> Counts:
        choices = (0, most) if few else range(most + 1)
        return tuple(tuple(rng.choice(choices) for _ in range(size)) for _ in range(size))

    full: Counts = ((most,) * size,) * size
    return [(full, full), *((drawn(at % 2 == 0), drawn(at % 3 == 0)) for at in range(PAIRS - 1))]


class Filling:
    """What one call fills."""

    def __init__(self, schedule: Schedule, counts: Counts) -> None:
        self.counts, self.size = counts, schedule.world_size
        self.counted = {buffer.name: buffer for buffer in schedule.buffers if buffer.counted}

    def operation(self, operation: Operation) -> Operation:
        """The operation as the call runs it."""
        if not any(part.buffer in self.counted for part in (*operation.reads, *operation.writes)):
            return operation
        match operation:
            case Put() | Get() | Copy():
                ends = self._beside(operation.sources, operation.destinations)
                return replace(operation, sources=ends[0], destinations=ends[1])
            case Compute():
                ends = self._beside(operation.a, operation.out)
                return replace(operation, a=ends[0], out=ends[1])
            case Reduce():
                ends = self._beside(operation.operands, (operation.out,))
                return replace(operation, operands=ends[0], out=ends[1][0])
            case Collective():
                ends = tuple(tuple(map(self.region, side)) for side in (operation.sources, operation.destinations))
                return replace(operation, sources=ends[0], destinations=ends[1])
        raise Malformed(f"{operation.name} knows nothing of counts")

    def _beside(self, ones: tuple[Region, ...], others: tuple[Region, ...]) -> tuple[tuple[Region, ...], ...]:
        if len(ones) != len(others):
            raise Malformed("regions without others beside them")
        pairs = [(self.region(one), self.region(other)) for one, other in zip(ones, others, strict=True)]
        cut = [tuple(_top(each, min(one.shape[0], other.shape[0])) for each in (one, other)) for one, other in pairs]
        return tuple(one for one, _ in cut), tuple(other for _, other in cut)

    def region(self, region: Region) -> Region:
        """The filled rows of a region, where they lie."""
        if region.buffer not in self.counted:
            return region
        return replace(region, rows=(self._before(region, region.rows[0]), self._before(region, region.rows[1])))

    def rows(self, region: Region) -> list[tuple[int, int]]:
        """Of the rows of a region that are there: which of the region's it is, and where it lies."""
        found = []
        for at, row in enumerate(range(*region.rows)):
            lo, hi = (self._before(region, one) for one in (row, row + 1))
            found += [(at, lo)] if hi > lo or region.buffer not in self.counted else []
        return found

    def _before(self, region: Region, row: int) -> int:
        """How many rows lie before one, of those that are there."""
        if region.buffer not in self.counted:
            return row
        buffer = self.counted[region.buffer]
        block, rest = divmod(buffer.rows, self.size)
        if rest or not block or not 0 <= region.rank < self.size or not 0 <= row <= buffer.rows:
            raise Malformed(f"{region} is of no whole blocks")
        peers = range(self.size)
        fills = [
            self.counts[region.rank][peer] if buffer.counted == "sent" else self.counts[peer][region.rank]
            for peer in peers
        ]
        at, within = divmod(row, block)
        return sum(fills[:at]) + (min(within, fills[at]) if within else 0)


def _top(region: Region, height: int) -> Region:
    rows: Range = (region.rows[0], region.rows[0] + height)
    return replace(region, rows=rows)


NOTHING = 0  # what an element holds that nothing was stored into
Label = tuple[object, ...]
CUT = {  # whether a library's call cuts what it sends, and what it gets, into a part for each member
    "all_gather": (False, True),
    "reduce_scatter": (True, False),
    "all_reduce": (False, False),
    "all_to_all": (True, True),
}


class Patch(NamedTuple):
    """What an operation stores, and, if it read an element that holds nothing, where."""

    stores: list[tuple[int, int]]
    unwritten: Region | None


class Memory:
    """Where each element lies, and the labels of values."""

    def __init__(self, schedule: Schedule, counts: tuple[Counts, ...]) -> None:
        self.schedule = schedule
        self.buffers = {buffer.name: buffer for buffer in schedule.buffers}
        self.fillings = [Filling(schedule, each) for each in counts]
        self.starts: dict[tuple[str, int], int] = {}
        self.shapes = {buffer.name: (buffer.rows, buffer.cols) for buffer in schedule.buffers}
        self.size = 0
        for buffer in schedule.buffers:
            for rank in range(schedule.world_size):
                self.starts[buffer.name, rank] = self.size
                self.size += extent_of(buffer)
        self.positions = {buffer.name: positions_of(buffer) for buffer in schedule.buffers}
        self.permuted = {buffer.name for buffer in schedule.buffers if buffer.blocks}
        self.pads = {}
        per_rank = 0
        for pad in schedule.pads:
            self.pads[pad.name] = (per_rank, pad.size)
            per_rank += pad.size
        self.per_rank = per_rank
        self.counters = per_rank * schedule.world_size
        self.labels: list[Label] = [("nothing",)]
        self.numbers: dict[Label, int] = {self.labels[0]: NOTHING}
        if len({buffer.name for buffer in schedule.buffers}) < len(schedule.buffers):
            raise Malformed("two buffers have one name")

    def blank(self) -> tuple[int, ...]:
        return (NOTHING,) * self.size

    def counter(self, pad: str, rank: int, signal: int) -> int:
        start, size = self.pads.get(pad, (0, 0))
        if not (0 <= signal < size and 0 <= rank < self.schedule.world_size):
            raise Malformed(f"signal {pad}@{rank}[{signal}]")
        return rank * self.per_rank + start + signal

    def counters_of(self, rank: int) -> tuple[int, int]:
        return rank * self.per_rank, (rank + 1) * self.per_rank

    def grid(self, region: Region) -> list[list[int]]:
        """The elements of a region, by row."""
        shape, start = self.shapes.get(region.buffer), self.starts.get((region.buffer, region.rank))
        (r0, r1), (c0, c1) = region.rows, region.cols
        if shape is None or start is None or not (0 <= r0 <= r1 <= shape[0] and 0 <= c0 <= c1 <= shape[1]):
            raise Malformed(f"region {region}")
        return [[start + at for at in row[c0:c1]] for row in self.positions[region.buffer][r0:r1]]

    # Which elements are touched, as bits.

    def elements(self, region: Region) -> int:
        bits = 0
        for row in self.grid(region):
            for element in row:
                bits |= 1 << element
        return bits

    def pad_element(self, rank: int) -> int:
        return 1 << (self.size + rank)

    def callers_elements(self, rank: int) -> int:
        bits = 0
        for buffer in self.schedule.buffers:
            if buffer.home in ("input", "output"):
                start = self.starts[buffer.name, rank]
                bits |= ((1 << extent_of(buffer)) - 1) << start
        return bits

    def touches(self, operation: Operation) -> tuple[int, int]:
        """(read, written). Raises Malformed where an operation's own reads and writes conflict."""
        if isinstance(operation, Collective) and self.is_permuted(operation):
            reads, writes = (sum(1 << element for element in span) for span in self.stretches(operation))
            if reads & writes and operation.function != "all_reduce":
                raise Malformed(f"{operation.name} reads what it writes")
            return reads, writes
        reads, writes = 0, 0
        for region in (*operation.writes, *(operation.regions if isinstance(operation, Retire) else ())):
            elements = self.elements(region)
            if writes & elements:
                raise Malformed(f"{operation.name} writes {region} twice")
            writes |= elements
        for region in operation.reads:
            elements = self.elements(region)
            if elements & writes and not _adds_to(operation, region):
                raise Malformed(f"{operation.name} reads {region} while it writes there")
            reads |= elements
        return reads, writes

    # What operations do.

    def result(self, operation: Operation, memory: list[int]) -> Patch:
        if isinstance(operation, Compute):
            return self._compute(operation, memory)
        if isinstance(operation, Reduce):
            total = self._sum([self.load(one, memory) for one in operation.operands])
            return self._patch(operation.out, self._ended(operation, operation.out, total))
        if isinstance(operation, Retire):
            return Patch([(at, NOTHING) for one in operation.regions for row in self.grid(one) for at in row], None)
        if isinstance(operation, Clear):
            return _merged([self._patch(one, self._zeros(one)) for one in operation.destinations])
        assert isinstance(operation, Put | Get | Copy | ReducePut)
        patches = []
        for source, destination in zip(operation.sources, operation.destinations, strict=True):
            values = self.load(source, memory)
            if isinstance(operation, ReducePut):
                values = self._sum([self.load(destination, memory), values], operation.unordered)
            patches.append(self._patch(destination, values))
        return _merged(patches)

    def exchange(self, parts: list[Collective], memory: list[int]) -> Patch:
        """What a collective does; `parts` stand in the order of its ranks."""
        permuted = [self.is_permuted(part) for part in parts]
        if any(permuted):
            if not all(permuted):
                raise Malformed(f"{parts[0].name}: some move blocks, others rows")
            return self._call(parts, memory)
        patches = []
        lengths = [len(parts) if is_cut else 1 for is_cut in CUT[parts[0].function]]
        if any([len(part.sources), len(part.destinations)] != lengths for part in parts):
            raise Malformed(f"{parts[0].name}: sides of other lengths")
        for at, part in enumerate(parts):
            if part.function in ("all_gather", "all_to_all"):
                which = 0 if part.function == "all_gather" else at
                for destination, source in zip(part.destinations, parts, strict=True):
                    patches.append(self._patch(destination, self.load(source.sources[which], memory)))
            else:
                which = 0 if part.function == "all_reduce" else at
                operands = [self.load(source.sources[which], memory) for source in parts]
                out = part.destinations[0]
                patches.append(self._patch(out, self._ended(part, out, self._sum(operands))))
        return _merged(patches)

    def is_permuted(self, part: Operation) -> bool:
        return bool(self.permuted & {region.buffer for region in (*part.reads, *part.writes)})

    def stretches(self, part: Collective) -> tuple[range, range]:
        """The elements that a library's call on permuted blocks reads, and those that it writes: the i-th of each are
        those of the same place in memory, whatever they are."""
        found = []
        for regions in (part.sources, part.destinations):
            name, span = stretch_of(self.buffers, regions, part.rank)
            start = self.starts[name, part.rank]
            found.append(range(start + span.start, start + span.stop))
        return (found[1] if part.function == "all_reduce" else found[0]), found[1]

    def _call(self, parts: list[Collective], memory: list[int]) -> Patch:
        """One call of a library, which knows a stretch at each side and cuts it into equal parts; of an all-reduce the
        one at which it stores."""
        if any(part.finishes for part in parts):
            raise Malformed(f"{parts[0].name}: a call ends no sums in blocks")
        sides, count = [self.stretches(part) for part in parts], len(parts)
        function = parts[0].function
        cuts = [count if is_cut else 1 for is_cut in CUT[function]]
        sizes = {(len(side) // cut, len(side) % cut) for pair in sides for side, cut in zip(pair, cuts, strict=True)}
        if len(sizes) > 1 or any(rest for _, rest in sizes):
            raise Malformed(f"{parts[0].name}: calls of different sizes")
        ((size, _),) = sizes
        stores: list[tuple[int, int]] = []
        for at, (_, target) in enumerate(sides):
            shares = [source[at * size : (at + 1) * size] if cuts[0] > 1 else source for source, _ in sides]
            if function in ("all_gather", "all_to_all"):
                values = [memory[element] for share in shares for element in share]
            else:
                values = self._sum([[[memory[element] for element in share]] for share in shares])[0]
            stores += zip(target, values, strict=True)
        named = {element for part in parts for out in part.destinations for row in self.grid(out) for element in row}
        is_unwritten = any(value == NOTHING for element, value in stores if element in named)
        return Patch(stores, parts[0].sources[0] if is_unwritten else None)

    def load(self, region: Region, memory: list[int]) -> list[list[int]]:
        return [[memory[element] for element in row] for row in self.grid(region)]

    def _compute(self, compute: Compute, memory: list[int]) -> Patch:
        a = [row for part in compute.a for row in self.load(part, memory)]
        b = self.load(compute.b, memory)
        columns = range(len(b[0]) if b else compute.out[0].cols[1] - compute.out[0].cols[0])
        if any(len(row) != len(b) for row in a):
            raise Malformed(f"{compute.name}: shapes")
        empty = any(value == NOTHING for row in (*a, *b) for value in row)
        result = [[self._product([(x, b[k][col]) for k, x in enumerate(row)]) for col in columns] for row in a]
        patches, top = [], 0
        for out in compute.out:
            height = out.rows[1] - out.rows[0]
            part = result[top : top + height]
            top += height
            if compute.accumulate:
                part = self._sum([self.load(out, memory), part])
            if compute.addends:
                if not 0 <= compute.place <= len(compute.addends) or compute.accumulate or len(compute.out) > 1:
                    raise Malformed(f"{compute.name}: addends")
                operands = [self.load(addend, memory) for addend in compute.addends]
                operands.insert(compute.place, part)
                part = self._sum(operands)
            ended = self._ended(compute, out, part)
            patches += [self._patch(place, ended) for place in (out, *compute.copies)]
        if top != len(a):
            raise Malformed(f"{compute.name}: shapes")
        merged = _merged(patches)
        return merged._replace(unwritten=compute.a[0]) if empty else merged

    def _product(self, pairs: list[tuple[int, int]]) -> int:
        return self._number(("sum", *pairs))

    def _ended(self, operation: Compute | Reduce | Collective, out: Region, values: list[list[int]]) -> list[list[int]]:
        """Sums, each finished with what the epilogue reads beside it: of the element of the rank's own result that has
        the row and column of `out`, if there is one."""
        if not operation.finishes:
            return values
        if isinstance(operation, Compute) and not operation.addends:
            raise Malformed(f"{operation.name} finishes nothing")
        beside = {
            (goal.region.rows[0] + i, goal.region.cols[0] + j): (goal.row + i, goal.col + j)
            for goal in self.schedule.goal
            if goal.region.rank == out.rank
            for i in range(goal.region.rows[1] - goal.region.rows[0])
            for j in range(goal.region.cols[1] - goal.region.cols[0])
        }
        return [
            [self._finished(value, beside.get((out.rows[0] + i, out.cols[0] + j))) for j, value in enumerate(row)]
            for i, row in enumerate(values)
        ]

    def _finished(self, value: int, beside: tuple[int, int] | None) -> int:
        return NOTHING if value == NOTHING else self._number(("finished", value, beside))

    def _zeros(self, region: Region) -> list[list[int]]:
        return [[self._number(("sum",)) for _ in row] for row in self.grid(region)]

    def _sum(self, operands: list[list[list[int]]], unordered: bool = False) -> list[list[int]]:
        first = operands[0]
        if any([len(row) for row in one] != [len(row) for row in first] for one in operands):
            raise Malformed("operands of different shapes")
        places = [[(i, j) for j in range(len(row))] for i, row in enumerate(first)]
        return [[self._add([one[i][j] for one in operands], unordered) for i, j in row] for row in places]

    def _add(self, values: list[int], unordered: bool) -> int:
        if len(values) == 1 or NOTHING in values:
            return values[0] if len(values) == 1 else NOTHING
        terms: list[object] = []
        for value in values:
            label = self.labels[value]
            terms += label[1:] if label[0] == "sum" else [value]
        if unordered:
            terms.sort(key=repr)
        return self._number(("sum", *terms))

    def _patch(self, out: Region, values: list[list[int]]) -> Patch:
        grid = self.grid(out)
        if [len(row) for row in grid] != [len(row) for row in values]:
            raise Malformed(f"{out} is given another shape")
        stores = [pair for row, its in zip(grid, values, strict=True) for pair in zip(row, its, strict=True)]
        return Patch(stores, out if any(value == NOTHING for _, value in stores) else None)

    # What callers give and get.

    def placed(self, region: Region, call: int) -> Iterator[tuple[int, list[int]]]:
        """Of the rows of a region that a call fills: which it is, and its elements."""
        for at, row in self.fillings[call].rows(region):
            yield at, self.grid(replace(region, rows=(row, row + 1)))[0]

    def fill_inputs(self, rank: int, call: int, memory: list[int]) -> None:
        self.spoil_callers_elements(rank, memory)
        for given in self.schedule.given:
            if given.region.rank == rank:
                for i, row in self.placed(given.region, call):
                    for j, element in enumerate(row):
                        memory[element] = self._element(given.tensor, given.row + i, given.col + j, call)

    def spoil_callers_elements(self, rank: int, memory: list[int]) -> None:
        for buffer in self.schedule.buffers:
            if buffer.home in ("input", "output"):
                start, size = self.starts[buffer.name, rank], extent_of(buffer)
                memory[start : start + size] = [NOTHING] * size

    def compare_goals(self, rank: int, call: int, memory: list[int]) -> str:
        """The first element that differs from its goal, or nothing."""
        for goal in self.schedule.goal:
            if goal.region.rank == rank:
                for i, row in self.placed(goal.region, call):
                    for j, element in enumerate(row):
                        wanted = self._element(goal.tensor, goal.row + i, goal.col + j, call)
                        if goal.terms:
                            a, _, b = goal.tensor.removesuffix(".finished").partition("@")
                            wanted = self._product(
                                [
                                    (self._element(a, goal.row + i, k, call), self._element(b, k, goal.col + j, call))
                                    for lo, hi in goal.terms
                                    for k in range(lo, hi)
                                ]
                            )
                        if goal.tensor.endswith(".finished"):
                            wanted = self._finished(wanted, (goal.row + i, goal.col + j))
                        if memory[element] != wanted and not (goal.unordered and self._same(memory[element], wanted)):
                            found = self.labels[memory[element]]
                            return f"{goal.region}: element [{i},{j}] is {found}, not {self.labels[wanted]}"
        return ""

    def _same(self, found: int, wanted: int) -> bool:
        """Whether two sums have the same terms, in whatever order."""
        one, other = self.labels[found], self.labels[wanted]
        return one[0] == other[0] == "sum" and sorted(one[1:], key=repr) == sorted(other[1:], key=repr)

    def commute(self, one: Operation, other: Operation) -> bool:
        """Whether two operations add to the same elements, neither minding whose part comes first."""
        if not (isinstance(one, ReducePut) and isinstance(other, ReducePut) and one.unordered and other.unordered):
            return False
        written = [self._union(each.destinations) for each in (one, other)]
        read = [self._union(each.sources) for each in (one, other)]
        return not (written[0] & read[1] or written[1] & read[0])

    def _union(self, parts: tuple[Region, ...]) -> int:
        bits = 0
        for part in parts:
            bits |= self.elements(part)
        return bits

    def _element(self, tensor: str, row: int, col: int, call: int) -> int:
        return self._number((tensor, row, col, call))

    def _number(self, label: Label) -> int:
        number = self.numbers.get(label)
        if number is None:
            number = self.numbers[label] = len(self.labels)
            self.labels.append(label)
        return number


def _adds_to(operation: Operation, region: Region) -> bool:
    """Whether the operation reads the region in order to store a sum with it there, element by element."""
    if isinstance(operation, ReducePut):
        return region in operation.destinations
    if isinstance(operation, Reduce):
        return region == operation.out
    if isinstance(operation, Collective):
        same = operation.sources == operation.destinations
        return operation.function == "all_reduce" and same and region in operation.sources
    return isinstance(operation, Compute) and operation.accumulate and region in operation.out


def _merged(patches: list[Patch]) -> Patch:
    unwritten = next((patch.unwritten for patch in patches if patch.unwritten is not None), None)
    return Patch([store for patch in patches for store in patch.stores], unwritten)
