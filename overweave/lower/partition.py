"""Partition IR: what a compiler that places tensors on a mesh (GSPMD, Alpa, DTensor, Domino) decides, as proven plans.

Of a matmul the placements of both factors and of the result imply what every rank multiplies, what travels before, and
what behind: of all ways the quickest is taken, by bytes and products. Each step is an all-gather, a reduce-scatter, an
all-reduce or an all-to-all among the ranks of a mesh axis, or a part that a rank keeps.
SOURCE: AutoOverlap 5.1 and Listing 3 (lower_partition_ir); Domino (Wang et al., 2024) for slices of batch and weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, cast

from overweave.errors import InputError
from overweave.ir.dtype import ITEMSIZE_BYTES, Dtype
from overweave.ir.schedule import Apply, Goal, InitialContents, Range, Schedule
from overweave.ir.shards import shard_rows
from overweave.ir.tensors import FACTORS
from overweave.ir.tensors import product as product_of
from overweave.lower.fused import fused_plan
from overweave.lower.layouts import Change, Placements, RankMesh, box_of, changes, mesh_of, placements_of
from overweave.lower.work import (
    AttentionOp,
    CommStep,
    Lowered,
    MatmulOp,
    Op,
    check_request,
    contents,
    machine_of,
    plan_of,
    promised,
)
from overweave.lower.writer import Cuboid, Held, Members, Shape, StepWriter, Terms, inside
from overweave.schedules.communication import EXCHANGES, TILES, W, X, Y
from overweave.schedules.records.record import LoweringPath

Local = tuple[Placements, ...]  # of factors and the result where a rank computes


def placements(
    op: Op, *, inputs: Mapping[str, Any], outputs: Any, mesh: Any, path: LoweringPath = "template"
) -> Lowered:
    """Return the plan of a matmul, or of attention, whose factors and result lie on a mesh as placements say.

    inputs: placements by tensor, `x` and `w`, or `q`, `k` and `v`; outputs: of the result; as `placements_of` reads
    them. mesh: a shape of one or two dimensions, a DeviceMesh, or a `RankMesh` with a machine. path: how collectives
    are written: `direct` (the library's), `template` (puts), `synth` (puts by the machine's links). Partial factors are
    sums over ranks of what they hold; a Partial result stays a sum to be made. A rank's tensors are its shards, of a
    matmul `[rows, cols]`, of attention `[batch * rows, heads * head_dim]`; ranks wait for what they read, alone.

    Raises InputError, with the place in the input, for placements that there are not or that no product has.
    """
    check_request(op, path)
    mesh = mesh_of(mesh)
    names = (X, W) if isinstance(op, MatmulOp) else ("q", "k", "v")
    if not isinstance(inputs, Mapping) or set(inputs) != set(names):
        found = f"those of {', '.join(map(str, inputs))}"[:80] if isinstance(inputs, Mapping) else f"{inputs!r:.40}"
        raise InputError(f"inputs of a {type(op).__name__}", found, f"Give {', '.join(names)}")
    dims, result = (2, Y) if isinstance(op, MatmulOp) else (3, "o")
    placed = {name: placements_of(f"inputs[{name}]", inputs[name], mesh, dims) for name in names}
    placed[result] = placements_of("outputs", outputs, mesh, dims)
    work = _MatmulWork(op, mesh, path, placed) if isinstance(op, MatmulOp) else _AttentionWork(op, mesh, path, placed)
    plan = plan_of(work.write(), mesh, op.dtype, path)
    fused = fused_plan(op, mesh, path, placed) if isinstance(op, MatmulOp) else None
    return Lowered(tuple(work.steps), plan, *(fused or ()))


class MeshWork:
    """What a matmul and attention have in common: redistributions before and behind. Dimensions of tensors are batch,
    rows and columns here."""

    def __init__(self, name: str, mesh: RankMesh, path: LoweringPath, dtype: Dtype) -> None:
        self.mesh, self.steps, self.machine = mesh, list[CommStep](), machine_of(mesh)
        self.item_bytes = ITEMSIZE_BYTES[dtype]
        self.writer = StepWriter(name, mesh.ranks, path, self.machine)

    def boxes(self, shape: Shape, placed: Placements) -> list[Cuboid]:
        return [cast(Cuboid, box_of(shape.extents, placed, self.mesh, rank)) for rank in range(self.mesh.ranks)]

    def redistributed(self, held: Held, before: Placements, after: Placements, target: Held | None = None) -> Held:
        """Return the tensor behind all steps from one list of placements to another. target: where it may lie then."""
        steps = [each for each in changes(before, after) if self.mesh.shape[each.axis] > 1]
        moving = [each for each in steps if each.kind != "slice"]
        for change in steps:
            groups = tuple(self.mesh.lines(change.axis))
            self.writer.into = target if moving and change is moving[-1] is steps[-1] else None
            step = CommStep(held.buffer.partition(".")[0], change.kind, groups)
            self.steps += [step] if step not in self.steps else []
            held = self._changed(held, change, groups)
        self.writer.into = None
        return held

    def _changed(self, held: Held, change: Change, groups: tuple[Members, ...]) -> Held:
        after = self.boxes(held.shape, change.after)

        hulls = {group: _hull([held.box(rank) for rank in group]) for group in groups}  # of one slice of a tensor
        parts = {rank: inside(after[rank], hull) for group, hull in hulls.items() for rank in group}
        wanted = parts.__getitem__
        match change.kind:
            case "all_gather":
                return self.writer.gather(held, groups)
            case "all_to_all":
                return self.writer.trade(held, groups, wanted)
            case "reduce_scatter":
                return self.writer.reduce(held, groups, wanted)
            case "all_reduce":
                return self.writer.reduce_everywhere(held, groups)
        kept = [held.parts(rank, wanted(rank)) for rank in range(self.mesh.ranks)]
        return held._replace(values=kept)

    def moved_us(self, shape: Shape, before: Placements, after: Placements) -> float:
        """Return how long a rank gets elements on the way from one list of placements to another, by bytes alone."""
        got = 0.0
        for change in changes(before, after):
            most = max(self.elements(shape, placed) for placed in (change.before, change.after))
            got += {"slice": 0, "all_reduce": 2}.get(change.kind, 1) * most * (1 - 1 / self.mesh.shape[change.axis])
        return got * self.item_bytes / self.machine.engines_gb_per_s / 1e3

    def computed_us(self, products: float) -> float:
        """Return how long so many multiplications and additions take."""
        return 2 * products / max(tile.tflops for tile in self.machine.tiles) / 1e6

    def elements(self, shape: Shape, placed: Placements) -> int:
        """Return how many elements the first rank has."""
        return prod(max(0, hi - lo) for lo, hi in box_of(shape.extents, placed, self.mesh, 0))

    def product_at(
        self, name: str, shape: Shape, boxes: Sequence[Cuboid], terms: Sequence[Terms], adds: bool = False
    ) -> Held:
        """Return where a result lies that is still to be brought to its callers. adds: it is added to, in fp32."""
        values = [[(box, of)] for box, of in zip(boxes, terms, strict=True)]
        return Held(self.writer.buffer(name, shape, "symmetric", dtype="float32" if adds else None), shape, values)

    def ended(self, held: Held, before: Placements, after: Placements, target: Held, tensor: str) -> None:
        """Bring a result where the caller wants it, and state what it holds."""
        held = self.redistributed(held, before, after, target)
        self.writer.finish(held, target)
        for rank in range(self.mesh.ranks):
            for box, terms in held.parts(rank, target.box(rank)):
                for region, (rows, cols) in zip(target.regions(rank, box), held.shape.rectangles(box), strict=True):
                    self.writer.goal.append(Goal(region, tensor, rows[0], cols[0], terms))


FORMS = (("R", "R", "R"), ("S1", "R", "S1"), ("R", "S2", "S2"), ("S2", "S1", "P"))  # of x, w and y along one mesh axis
OF_PARTIAL = {("P", "R"): ("P", "R", "P"), ("R", "P"): ("R", "P", "P")}


class _MatmulWork(MeshWork):
    """given, local: placements of x, w and y, of callers and where ranks multiply."""

    def __init__(self, op: MatmulOp, mesh: RankMesh, path: LoweringPath, placed: Mapping[str, Placements]) -> None:
        super().__init__("matmul", mesh, path, op.dtype)
        self.op, self.given = op, {name: inner(placed[name], (1, 2)) for name in (X, W, Y)}
        self.shapes = shapes_of(op)
        self.local = dict(zip((X, W, Y), self._forms(), strict=True))

    def write(self) -> Schedule:
        """Write all operations."""
        x, w = (self.redistributed(self._factor(name), self.given[name], self.local[name]) for name in (X, W))
        terms = [self._terms(x, rank) for rank in range(self.mesh.ranks)]
        shape = self.shapes[Y]
        target = self.writer.callers(Y, shape, self.boxes(shape, self.given[Y]), "output", terms)
        slices = [*_sliced(self.boxes(shape, self.local[Y]), self.op.slices)]
        if len(slices) > 1:
            self.writer.library = EXCHANGES
        if self.local[Y] == self.given[Y]:
            slices, products = slices[:1], [target]
        else:
            products = [self.product_at(f"{Y}.part{at}", shape, boxes, terms) for at, boxes in enumerate(slices)]
        for held in products:
            self._multiply(x, w, held)
        for held in products:
            self.ended(held, self.local[Y], self.given[Y], target, product_of(*FACTORS))
        return self.writer.schedule()

    def _multiply(self, x: Held, w: Held, held: Held) -> None:
        for rank in range(self.mesh.ranks):
            (_, rows, cols), k = held.box(rank), x.box(rank)[2]
            (a,), (b,) = x.regions(rank, ((0, 1), rows, k)), w.regions(rank, ((0, 1), k, cols))
            out = held.regions(rank, held.box(rank))
            if not out[0].is_empty:
                self.writer.multiply(rank, a, b, out)

    def _forms(self) -> Local:
        """Return the placements of factors and of the product by which a call takes least, or raise InputError."""
        choices = []
        for axis, (x, w, y) in enumerate(zip(*self.given.values(), strict=True)):
            if "P" in (x, w) and (x, w) not in OF_PARTIAL:
                asked = f"inputs[x] and inputs[w], mesh dimension {axis}"
                found = "both are partial sums" if x == w else "one is a partial sum, the other sharded"
                raise InputError(asked, found, "Reduce the one before, or replicate the other there")
            forms = (OF_PARTIAL[x, w],) if "P" in (x, w) else FORMS
            choices.append([form for form in forms if y != "P" or form[2] == "P"])
        tried: list[Local] = [tuple(zip(*forms, strict=True)) for forms in product(*choices)]
        if self.op.slices != (1, 1):  # every rank may compute all that it wants
            tried = [local for local in tried if self._sums(local)]
        return min(tried, key=self._us)

    def _us(self, local: Local) -> float:
        """Return how long it takes a rank to get what it needs, and to multiply."""
        pairs = zip(self.given.items(), local, strict=True)
        ways = ((name, (placed, at) if name != Y else (at, placed)) for (name, placed), at in pairs)
        moved = sum(self.moved_us(self.shapes[name], *way) for name, way in ways)
        return moved + self.computed_us(self.elements(self.shapes[X], local[0]) * self._width(local[1]))

    def _width(self, w: Placements) -> int:
        """Return how many columns the first rank multiplies by."""
        lo, hi = box_of(self.shapes[W].extents, w, self.mesh, 0)[2]
        return hi - lo

    def _factor(self, name: str) -> Held:
        """Return a factor as the caller has it."""
        held = self.writer.callers(name, self.shapes[name], self.boxes(self.shapes[name], self.given[name]), "input")
        for rank in range(self.mesh.ranks):
            (_, (row, _), (col, _)), offset = held.box(rank), self._offset(rank)
            (region,) = held.regions(rank, held.box(rank))
            at = (row, col + offset) if name == X else (row + offset, col)
            if not region.is_empty:
                self.writer.given.append(InitialContents(region, FACTORS[name == W], *at))
        return held

    def _terms(self, x: Held, rank: int) -> Terms:
        """Return the part of the reduced axis that a rank multiplies. Raises InputError if it is none."""
        (lo, hi), offset = x.box(rank)[2], self._offset(rank)
        if lo == hi:
            asked = f"k={self.op.k} on {self.mesh.ranks} ranks"
            raise InputError(asked, f"rank {rank} has nothing to multiply", "Shard k over fewer ranks")
        return ((lo + offset, hi + offset),)

    def _offset(self, rank: int) -> int:
        """Return where a rank's part of the reduced axis begins: those of partial factors lie one behind the other."""
        offset = 0
        for axis, places in enumerate(zip(self.given[X], self.given[W], strict=True)):
            offset = offset * self.mesh.shape[axis] + self.mesh.place(rank)[axis] if "P" in places else offset
        return offset * self.op.k

    def _sums(self, local: Local) -> bool:
        """Whether what products take behind them is done slice by slice: sums alone."""
        return not {"all_gather", "all_to_all"} & {each.kind for each in changes(local[2], self.given[Y])}


OF_ATTENTION = (("R", "R", "R"), ("S0", "S0", "S0"), ("S2", "S2", "S2"), ("S1", "R", "S1"))  # of q, of k and v, of o


class _AttentionWork(MeshWork):
    """given: placements of q, k, v and o, as callers have them."""

    def __init__(self, op: AttentionOp, mesh: RankMesh, path: LoweringPath, placed: Mapping[str, Placements]) -> None:
        super().__init__("attention", mesh, path, op.dtype)
        if partial := next((name for name, places in placed.items() if "P" in places), None):
            raise InputError(f"placements of {partial}", "a partial sum", "Reduce it before: softmax is of whole rows")
        self.given = {name: inner(places, (0, 2, 1)) for name, places in placed.items()}
        self.shape = shapes_of(op)["o"]

    def write(self) -> Schedule:
        """Write all operations."""
        q_at, kv_at, o_at = self._forms()
        held = {}
        for name, local in (("q", q_at), ("k", kv_at), ("v", kv_at)):
            given = self.writer.callers(name, self.shape, self.boxes(self.shape, self.given[name]), "input")
            for rank in range(self.mesh.ranks):
                self.writer.given += contents(given, rank, given.box(rank), name)
            held[name] = self.redistributed(given, self.given[name], local)
        target = self.writer.callers("o", self.shape, self.boxes(self.shape, self.given["o"]), "output")
        nothing: list[Terms] = [()] * self.mesh.ranks
        boxes = self.boxes(self.shape, o_at)
        made = target if o_at == self.given["o"] else self.product_at("o.part", self.shape, boxes, nothing)
        for rank in range(self.mesh.ranks):
            self._attend(held, made, rank)
        self.ended(made, o_at, self.given["o"], target, "o")
        return self.writer.schedule()

    def _attend(self, held: Mapping[str, Held], made: Held, rank: int) -> None:
        needs = [each for name, one in held.items() for each in contents(one, rank, one.box(rank), name)]
        makes = promised(contents(made, rank, made.box(rank), "o"))
        if makes:
            tiles = ((0, 1),)
            self.writer.add(Apply, rank, TILES, function="attention", needs=tuple(needs), makes=makes, tiles=tiles)

    def _forms(self) -> Local:
        """Return the placements of q, of k and v, and of o by which a call takes least."""
        tried: list[Local] = [
            tuple(zip(*forms, strict=True)) for forms in product(OF_ATTENTION, repeat=len(self.mesh.shape))
        ]
        return min(tried, key=self._us)

    def _us(self, local: Local) -> float:
        """Return how long it takes a rank to get what it needs, and to compute."""
        q, kv, o = local
        pairs = ((self.given["q"], q), (self.given["k"], kv), (self.given["v"], kv), (o, self.given["o"]))
        moved = sum(self.moved_us(self.shape, *pair) for pair in pairs)
        return moved + 2 * self.computed_us(self.elements(self.shape, q) * self.shape.width * self.shape.extents[1])


def _hull(boxes: Sequence[Cuboid]) -> Cuboid:
    """The box that others make up."""
    ranges = [(min(box[dim][0] for box in boxes), max(box[dim][1] for box in boxes)) for dim in range(3)]
    return cast(Cuboid, tuple(ranges))


def shapes_of(op: Op) -> dict[str, Shape]:
    """The shapes of all tensors."""
    if isinstance(op, MatmulOp):
        return {X: Shape((1, op.m, op.k)), W: Shape((1, op.k, op.n)), Y: Shape((1, op.m, op.n))}
    return dict.fromkeys(("q", "k", "v", "o"), Shape((op.batch, op.rows, op.heads), op.head_dim))


def inner(placed: Placements, dims: tuple[int, ...]) -> Placements:
    """Placements by the dimensions batch, rows and columns. dims: what the tensor's own are there."""
    return tuple(f"S{dims[int(place[1:])]}" if place[0] == "S" else place for place in placed)


def _sliced(boxes: list[Cuboid], slices: tuple[int, int]) -> Iterator[list[Cuboid]]:
    """The same slice of every rank's product: of its rows, and of its columns."""

    def part(range_: Range, count: int, at: int) -> Range:
        first, last = shard_rows(range_[1] - range_[0], count, at)
        return range_[0] + first, range_[0] + last

    for row, col in product(range(slices[0]), range(slices[1])):
        yield [(batch, part(rows, slices[0], row), part(cols, slices[1], col)) for batch, rows, cols in boxes]
