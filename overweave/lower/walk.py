"""A loop nest walked step by step: which block every rank computes with, where it comes from, and what waits for it."""

from __future__ import annotations

from typing import Any, cast

from msgspec.structs import replace

from overweave.errors import InputError
from overweave.ir.schedule import Apply, Copy, Get, InitialContents, Put, Range, Schedule
from overweave.ir.tensors import FACTORS
from overweave.ir.tensors import product as product_of
from overweave.lower.fused import fused_plan
from overweave.lower.layouts import Placements, mesh_of
from overweave.lower.nest import Nest, Read, read
from overweave.lower.partition import MeshWork, inner, shapes_of
from overweave.lower.work import CommStep, Lowered, MatmulOp, check_request, contents, plan_of, promised
from overweave.lower.writer import Cuboid, Held, Shape, Terms, inside, is_empty
from overweave.schedules.communication import COPIES, MAIN, TILES, W, X, Y, shifted
from overweave.schedules.records.record import LoweringPath

Numbers = tuple[int, ...]  # of all loops, at one step


def loops(nest: Nest, *, mesh: Any, path: LoweringPath = "template") -> Lowered:
    """Return the plan of a loop nest.

    mesh, path: as of `placements`. Blocks of a loop that are kept come from the neighbour who used them one step
    before, by a put that waits for nothing but the block; those that are not kept are pulled from where they lie; what
    is kept above all loops is gathered first, by the path. A step waits for its blocks, alone. Raises InputError, with
    the number of the word, for a nest that is none.
    """
    if not isinstance(nest, Nest) or not isinstance(nest.words, tuple | list):
        raise InputError("loops", f"{nest!r:.60} is no nest", "Give lower.Nest(op, (word, ...))")
    check_request(nest.op, path)
    found = read(nest, mesh_of(mesh))
    walk = _MatmulWalk(found, path) if isinstance(nest.op, MatmulOp) else _AttentionWalk(found, path)
    plan = plan_of(walk.write(), found.mesh, nest.op.dtype, path)
    fused = fused_plan(nest.op, found.mesh, path, found.homes) if isinstance(nest.op, MatmulOp) else None
    return Lowered(tuple(walk.steps), plan, *(fused or ()))


class _Walk(MeshWork):
    """What a matmul and attention have in common. homes: tensors as callers have them, or gathered. staged: where
    blocks of peers land. shared: where peers pull from."""

    def __init__(self, name: str, found: Read, path: LoweringPath, dims: tuple[int, ...]) -> None:
        """found: the loop nest as it was read. dims: what each dimension of a tensor is: batch 0, rows 1, columns 2."""
        super().__init__(name, found.mesh, path, found.op.dtype)
        self.read, self.dims = found, dims
        self.given = {name: inner(placed, dims) for name, placed in found.homes.items()}
        self.homes: dict[str, Held] = {}
        self.staged: dict[str, Held] = {}
        self.shared: dict[str, Held] = {}
        self.shapes = shapes_of(found.op)
        self.numbers = list(found.steps())

    def callers_of(self, name: str, shape: Shape) -> Held:
        return self.writer.callers(name, shape, self.boxes(shape, self.given[name]), "input")

    def start(self, name: str, held: Held) -> None:
        """Take a tensor as its callers have it; gather it, if it is kept above all loops."""
        needed = tuple("R" if place[0] == "S" else place for place in self.given[name])
        self.homes[name] = self.redistributed(held, self.given[name], needed) if name in self.read.gathered else held
        stage = self.writer.buffer(f"{name}.blocks", held.shape, "symmetric")
        self.staged[name] = Held(stage, held.shape, held.values)

    def box(self, name: str, rank: int, step: Numbers) -> Cuboid:
        """The block of a tensor that a rank needs."""
        ranges: list[Range] = [(0, 1)] * 3
        for dim, axis in zip(self.dims, self.read.tensors[name], strict=True):
            ranges[dim] = self.read.block(rank, axis, step)
        return cast(Cuboid, tuple(ranges))

    def is_home(self, name: str, rank: int, box: Cuboid) -> bool:
        return inside(self.homes[name].box(rank), box) == box

    def place(self, name: str, rank: int, box: Cuboid) -> Held:
        """Where a rank reads a block."""
        return (self.homes if self.is_home(name, rank, box) else self.staged)[name]

    def bring(self, at: int) -> None:
        """Bring to every rank the blocks of a step that it has not had."""
        for name in [*self.read.tensors][:-1]:
            for rank in range(self.mesh.ranks):
                box = self.box(name, rank, self.numbers[at])
                had = any(self.box(name, rank, earlier) == box for earlier in self.numbers[:at])
                if not (had or self.is_home(name, rank, box) or is_empty(box)):
                    source = self._neighbour(name, rank, at) if name in self.read.passed else None
                    self._pass(name, rank, source, box) if source is not None else self._pull(name, rank, box)

    def _neighbour(self, name: str, rank: int, at: int) -> int | None:
        """The rank beside this one that had a block one step before, of the innermost loop that has gone on, if any.
        Raises InputError."""
        step, place = self.numbers[at], self.mesh.place(rank)
        box = self.box(name, rank, step)
        turned = [index for index, one in enumerate(self.read.loops) if one.over and step[index]]
        for index in reversed(turned):
            before, one = (*step[:index], step[index] - 1, *step[index + 1 :]), self.read.loops[index]
            for axis in one.over:
                beside = (*place[:axis], (place[axis] + one.by) % self.mesh.shape[axis], *place[axis + 1 :])
                if self.box(name, other := self.mesh.rank(beside), before) == box:
                    return other
        if not turned:
            return None
        found = f"no neighbour of rank {rank} has its block of step {at} one step before"
        cure = "Shift a loop over the mesh dimension along which blocks pass, or keep it nowhere"
        raise InputError(f"buffer({name!r}) in a loop", found, cure)

    def _pass(self, name: str, rank: int, source: int, box: Cuboid) -> None:
        sent, got = self.place(name, source, box).regions(source, box), self.staged[name].regions(rank, box)
        self.writer.add(Put, source, f"{COPIES}.{name}", sources=sent, destinations=got)
        self._note(name, "put", source, rank)

    def _pull(self, name: str, rank: int, box: Cuboid) -> None:
        """Pull a block from those that have it, each its part, from the nearest ones first."""
        left = [box]
        for owner in ((rank + step) % self.mesh.ranks for step in range(self.mesh.ranks)):
            for part in list(left):
                both = inside(self.homes[name].box(owner), part)
                if is_empty(both):
                    continue
                left.remove(part)
                left += _without(part, both)
                is_own = owner == rank
                source = self.homes[name] if is_own else self._shared(name)
                ends = {"sources": source.regions(owner, both), "destinations": self.staged[name].regions(rank, both)}
                self.writer.add(Copy if is_own else Get, rank, MAIN if is_own else f"{COPIES}.{name}", **ends)
                self._note(name, "get", owner, rank)
        if left:
            raise InputError(
                f"tensor {name}", f"no rank has its block {left[0]}", "Shard it so that ranks have all of it"
            )

    def _shared(self, name: str) -> Held:
        """Where peers may read what a rank has."""
        home = self.homes[name]
        if home.own is None:
            return home
        if name not in self.shared:
            place = self.writer.buffer(f"{name}.shared", home.shape, "symmetric")
            self.shared[name] = Held(place, home.shape, home.values)
            for rank in range(self.mesh.ranks):
                ends = (each.regions(rank, home.box(rank)) for each in (home, self.shared[name]))
                self.writer.add(Copy, rank, MAIN, **dict(zip(("sources", "destinations"), ends, strict=True)))
        return self.shared[name]

    def _note(self, name: str, kind: str, source: int, target: int) -> None:
        step = CommStep(name, kind, ((source, target),))
        self.steps += [step] if step not in self.steps and source != target else []


class _MatmulWalk(_Walk):
    def __init__(self, found: Read, path: LoweringPath) -> None:
        super().__init__("matmul_loops", found, path, (1, 2))
        self.shape = self.shapes[Y]

    def write(self) -> Schedule:
        """Write all operations."""
        for name in (X, W):
            held = self.callers_of(name, self.shapes[name])
            for rank in range(self.mesh.ranks):
                for one in contents(held, rank, held.box(rank), FACTORS[name == W]):
                    self.writer.given.append(one)
            self.start(name, held)
        local = self._local()
        boxes = self.boxes(self.shape, self.given[Y])
        target = self.writer.callers(Y, self.shape, boxes, "output", [()] * self.mesh.ranks)
        terms = self._terms()
        adds = any(len(of) > 1 for values in terms for of in values.values())
        is_there = local == self.given[Y] and not (adds and self.read.op.dtype != "float32")
        made = target if is_there else self.product_at(f"{Y}.part", self.shape, boxes, [()] * self.mesh.ranks, adds)
        made = made._replace(values=[[*values.items()] for values in terms])
        seen: set[tuple[int, Cuboid]] = set()
        for at in range(len(self.numbers)):
            self.bring(at)
            for rank in range(self.mesh.ranks):
                self._multiply(made, rank, at, seen)
        self.ended(made, local, self.given[Y], target, product_of(*FACTORS))
        return self.writer.schedule()

    def _multiply(self, made: Held, rank: int, at: int, seen: set[tuple[int, Cuboid]]) -> None:
        step = self.numbers[at]
        boxes = {name: self.box(name, rank, step) for name in (X, W, Y)}
        if any(map(is_empty, boxes.values())):
            return
        (a,), (b,) = (self.place(name, rank, boxes[name]).regions(rank, boxes[name]) for name in (X, W))
        out, is_more = made.regions(rank, boxes[Y]), (rank, boxes[Y]) in seen
        seen.add((rank, boxes[Y]))
        self.writer.multiply(rank, a, b, out, is_more)

    def _terms(self) -> list[dict[Cuboid, Terms]]:
        """Return for each rank the blocks of the product, and the parts of the reduced axis that are added."""
        found: list[dict[Cuboid, Terms]] = [{} for _ in range(self.mesh.ranks)]
        for step in self.numbers:
            for rank, blocks in enumerate(found):
                box, k = self.box(Y, rank, step), self.read.block(rank, "k", step)
                if k[0] == k[1]:
                    asked = f"k={self.read.extents['k']} on {self.mesh.ranks} ranks"
                    raise InputError(asked, f"rank {rank} has nothing to multiply", "Parallelize another axis")
                if not is_empty(box):
                    blocks[box] = (*blocks.get(box, ()), k)
        return found

    def _local(self) -> Placements:
        """Return the placements of the product where ranks make it."""
        placed = ["R"] * len(self.mesh.shape)
        for axis, cut in self.read.parallel.items():
            for at in cut:
                placed[at] = {"m": "S1", "n": "S2", "k": "P"}[axis]
        return tuple(placed)


class _AttentionWalk(_Walk):
    """Every step makes a piece of the result; a last kernel merges all pieces of a rank."""

    def __init__(self, found: Read, path: LoweringPath) -> None:
        super().__init__("attention_loops", found, path, (0, 2, 1))
        self.shape = self.shapes["o"]

    def write(self) -> Schedule:
        """Write all operations."""
        for name in ("q", "k", "v"):
            held = self.callers_of(name, self.shape)
            for rank in range(self.mesh.ranks):
                self.writer.given += contents(held, rank, held.box(rank), name)
            self.start(name, held)
        nothing: list[Terms] = [()] * self.mesh.ranks
        target = self.writer.callers("o", self.shape, self.boxes(self.shape, self.given["o"]), "output", nothing)
        local = self._local()
        boxes = self.boxes(self.shape, local)
        made = target if local == self.given["o"] else self.product_at("o.part", self.shape, boxes, nothing)
        steps = len(self.numbers)
        pieces = self.writer.buffer("pieces", self.shape, "local", steps)
        for at in range(steps):
            self.bring(at)
            for rank in range(self.mesh.ranks):
                self._attend(pieces, rank, at)
        for rank in range(self.mesh.ranks):
            needs = tuple(each for at in range(steps) for each in self._piece(pieces, rank, at))
            makes = promised(contents(made, rank, made.box(rank), "o"))
            if makes:
                self.writer.add(Apply, rank, TILES, function="merge", needs=needs, makes=makes, tiles=((0, 1),))
        self.ended(made, local, self.given["o"], target, "o")
        return self.writer.schedule()

    def _attend(self, pieces: str, rank: int, at: int) -> None:
        needs = []
        for name in ("q", "k", "v"):
            box = self.box(name, rank, self.numbers[at])
            needs += contents(self.place(name, rank, box), rank, box, name)
        makes = promised(self._piece(pieces, rank, at))
        if makes:
            self.writer.add(Apply, rank, TILES, function="attention", needs=tuple(needs), makes=makes, tiles=((0, 1),))

    def _piece(self, pieces: str, rank: int, at: int) -> list[InitialContents]:
        """Return what a step makes: the part of the result that keys of one block have, named by the first of them."""
        step = self.numbers[at]
        held = Held(pieces, self.shape, [])
        box = self.box("o", rank, step)
        keys = self.read.block(rank, "kv", step)[0]
        rows = self.shape.matrix[0]
        found = contents(held, rank, box, f"piece.{keys}")
        return [replace(one, region=replace(one.region, rows=shifted(one.region.rows, at * rows))) for one in found]

    def _local(self) -> Placements:
        placed = ["R"] * len(self.mesh.shape)
        for axis, cut in self.read.parallel.items():
            for at in cut:
                if axis == "kv":
                    found, cure = "softmax is of all keys", "Walk kv in a loop"
                    raise InputError(f"parallelize('kv', {at})", found, cure)
                placed[at] = {"b": "S0", "h": "S2", "q": "S1"}[axis]
        return tuple(placed)


def _without(box: Cuboid, part: Cuboid) -> list[Cuboid]:
    """What is left of a box without a part of it."""
    left: list[Cuboid] = []
    for dim in range(3):
        for cut in ((box[dim][0], part[dim][0]), (part[dim][1], box[dim][1])):
            if cut[0] < cut[1]:
                left.append(cast(Cuboid, (*part[:dim], cut, *box[dim + 1 :])))
    return left
