"""Loop IR: a loop nest over a mesh, as Mercury writes ring attention, as the steps that it takes.

A nest is a list of words. `parallelize` gives each coordinate of a mesh dimension its part of an axis, `shard` says
where a tensor lies, `loop` walks the blocks of an axis, `shift` lets every rank begin with another block, and `buffer`
keeps a tensor: above all loops all of it, gathered; in a loop the blocks that pass, from neighbour to neighbour. What
is kept nowhere is pulled from where it lies, step by step.
SOURCE: Mercury (Guan et al., SOSP 2025): loops whose shifts are the transfers of a ring; AutoOverlap 5.1, Listing 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import NamedTuple, NoReturn

from msgspec import Struct
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.ir.schedule import Range
from overweave.ir.shards import shard_rows
from overweave.lower.layouts import Placements, RankMesh
from overweave.lower.work import MatmulOp, Op

AXES: dict[bool, dict[str, tuple[str, ...]]] = {  # of a matmul, of attention: tensor -> its axes, the result last
    True: {"x": ("m", "k"), "w": ("k", "n"), "y": ("m", "n")},
    False: {"q": ("b", "h", "q"), "k": ("b", "h", "kv"), "v": ("b", "h", "kv"), "o": ("b", "h", "q")},
}


class Parallelize(Struct, frozen=True):
    """Each coordinate of a mesh dimension computes its part of an axis."""

    axis: str
    mesh: int


class Shard(Struct, frozen=True):
    """A tensor lies in shards: which mesh dimension cuts which of its axes."""

    tensor: str
    cuts: tuple[tuple[int, str], ...]  # mesh dimension, axis


class BlockLoop(Struct, frozen=True):
    """Blocks of an axis, one after the other. over: mesh dimensions whose coordinates are added to the block's number;
    by: how far a step goes."""

    axis: str
    trips: int = 0
    block: int = 0
    over: tuple[int, ...] = ()
    by: int = 1


class Shift(Struct, frozen=True):
    axis: str
    over: tuple[int, ...]
    by: int = 1


class Keep(Struct, frozen=True):
    tensor: str


NestWord = Parallelize | Shard | BlockLoop | Shift | Keep


def parallelize(axis: str, mesh: int) -> Parallelize:
    """Compute an axis in parts, along a mesh dimension."""
    return Parallelize(axis, mesh)


def shard(tensor: str, **cuts: int | tuple[int, ...]) -> Shard:
    """Let a tensor lie in shards: `shard("x", m=0, k=1)`; `shard("k", kv=(0, 1))` cuts an axis twice."""
    pairs = ((at, axis) for axis, each in cuts.items() for at in (each if isinstance(each, tuple) else (each,)))
    return Shard(tensor, tuple(pairs))


def loop(axis: str, trips: int = 0, *, block: int = 0) -> BlockLoop:
    """Walk an axis in so many blocks, or in blocks of so many elements."""
    return BlockLoop(axis, trips, block)


def shift(axis: str, over: int | tuple[int, ...], by: int = 1) -> Shift:
    """Let the innermost loop of an axis begin at a rank's coordinates, and go on by one block a step, or back by -1."""
    return Shift(axis, (over,) if isinstance(over, int) else over, by)


def buffer(tensor: str) -> Keep:
    """Keep what is read of a tensor from here on."""
    return Keep(tensor)


class Nest(Struct, frozen=True):
    """What a rank computes in a loop nest: a matmul or attention, and its words, outermost first."""

    op: Op
    words: tuple[NestWord, ...]


class Read(NamedTuple):
    """A nest that was checked. parallel: axis -> the mesh dimensions that cut it. homes: tensor -> its placements, by
    its own axes. gathered, passed: tensors that are kept, above all loops or in one."""

    op: Op
    mesh: RankMesh
    parallel: dict[str, tuple[int, ...]]
    homes: dict[str, Placements]
    loops: tuple[BlockLoop, ...]
    gathered: frozenset[str]
    passed: frozenset[str]

    @property
    def tensors(self) -> Mapping[str, tuple[str, ...]]:
        return AXES[isinstance(self.op, MatmulOp)]

    @property
    def extents(self) -> dict[str, int]:
        op = self.op
        if isinstance(op, MatmulOp):
            return {"m": op.m, "n": op.n, "k": op.k}
        return {"b": op.batch, "h": op.heads, "q": op.rows, "kv": op.rows}

    def steps(self) -> Iterator[tuple[int, ...]]:
        """The numbers of all loops, step by step."""
        return product(*(range(one.trips) for one in self.loops))

    def part(self, rank: int, axis: str) -> Range:
        """Which part of an axis a rank computes."""
        lo, hi = 0, self.extents[axis]
        for at in self.parallel.get(axis, ()):
            lo, hi = _cut((lo, hi), self.mesh.shape[at], self.mesh.place(rank)[at])
        return lo, hi

    def block(self, rank: int, axis: str, step: Sequence[int]) -> Range:
        """Which elements of an axis a rank is at."""
        found, place = self.part(rank, axis), self.mesh.place(rank)
        for number, one in zip(step, self.loops, strict=True):
            if one.axis == axis:
                index = (number * one.by + sum(place[at] for at in one.over)) % one.trips
                found = _cut(found, one.trips, index)
        return found


def _cut(whole: Range, count: int, index: int) -> Range:
    first, last = shard_rows(whole[1] - whole[0], count, index)
    return whole[0] + first, whole[0] + last


def read(nest: Nest, mesh: RankMesh) -> Read:
    """Check a nest, word by word. Raises InputError, with the number of the word."""
    tensors = AXES[isinstance(nest.op, MatmulOp)]
    found = Read(nest.op, mesh, {}, {}, (), frozenset(), frozenset())
    for number, word in enumerate(nest.words):
        found = _Reader(f"word {number}, {_shown(word)}", found).taken(word)
    homes = {name: found.homes.get(name, ("R",) * len(mesh.shape)) for name in tensors}
    return found._replace(homes=homes)


class _Reader:
    """Takes one word. asked: how errors name it."""

    def __init__(self, asked: str, known: Read) -> None:
        self.asked, self.known = asked, known

    def taken(self, word: NestWord) -> Read:
        known = self.known
        match word:
            case Parallelize():
                self._check_axis(word.axis)
                self._check_mesh(word.mesh)
                if taken := next((axis for axis, each in known.parallel.items() if word.mesh in each), None):
                    self._refuse(f"mesh dimension {word.mesh} is taken by axis {taken}", "Give each axis its own")
                return known._replace(
                    parallel=known.parallel | {word.axis: (*known.parallel.get(word.axis, ()), word.mesh)}
                )
            case Shard():
                return known._replace(homes=known.homes | {word.tensor: self._home(word)})
            case BlockLoop():
                return known._replace(loops=(*known.loops, self._loop(word)))
            case Shift():
                return known._replace(loops=self._shifted(word))
            case Keep():
                inputs = [*known.tensors][:-1]
                if word.tensor not in inputs:
                    self._refuse("it is read by no step", f"Name one of {', '.join(inputs)}")
                field = "passed" if known.loops else "gathered"
                return known._replace(**{field: getattr(known, field) | {word.tensor}})
            case _:
                raise InputError(self.asked, "no word of a nest", "Use parallelize, shard, loop, shift or buffer")

    def _home(self, word: Shard) -> Placements:
        known = self.known
        if word.tensor not in known.tensors:
            self._refuse(f"there is no tensor {word.tensor}", f"Name one of {', '.join(known.tensors)}")
        if word.tensor in known.homes:
            self._refuse(f"{word.tensor} lies somewhere already", "Shard each tensor once")
        placed = ["R"] * len(known.mesh.shape)
        axes = known.tensors[word.tensor]
        for at, axis in word.cuts:
            self._check_mesh(at)
            if axis not in axes:
                self._refuse(f"{word.tensor} has no axis {axis}", f"Name one of {', '.join(axes)}")
            if placed[at] != "R":
                self._refuse(f"mesh dimension {at} cuts two axes", "Let each cut one")
            placed[at] = f"S{axes.index(axis)}"
        return tuple(placed)

    def _loop(self, word: BlockLoop) -> BlockLoop:
        """The loop with its trips, which must be those of all ranks."""
        self._check_axis(word.axis)
        self._check_numbers(word.trips, word.block)
        if word.trips and word.block:
            self._refuse("both trips and a block", "Give one of them")
        if word.block:
            counts = {-(-(hi - lo) // word.block) for lo, hi in self._parts(word.axis)}
            if len(counts) > 1:
                found = f"ranks take {' and '.join(map(str, sorted(counts)))} trips"
                self._refuse(found, "Choose a block, or sizes, by which all take as many, or give trips")
            word = replace(word, trips=counts.pop())
        if word.trips < 1:
            self._refuse(f"{word.trips} trips", "Give trips, or a block, of at least 1")
        counts_of_axis = [one.trips for one in self.known.loops if one.axis == word.axis] + [word.trips]
        shortest = min(hi - lo for lo, hi in self._parts(word.axis))
        for count in counts_of_axis:  # the last block of each cut is the shortest
            first, last = shard_rows(shortest, count, count - 1)
            shortest = last - first
        if not shortest:
            self._refuse(f"{prod(counts_of_axis)} blocks of {word.axis} leave some empty", "Take fewer trips")
        return word

    def _shifted(self, word: Shift) -> tuple[BlockLoop, ...]:
        known = self.known
        place = max((at for at, one in enumerate(known.loops) if one.axis == word.axis), default=None)
        if place is None:
            self._refuse(f"no loop of {word.axis} stands above it", f'Write loop("{word.axis}", trips) before it')
        for at in word.over:
            self._check_mesh(at)
            if known.mesh.shape[at] != known.loops[place].trips:
                found = f"{known.loops[place].trips} trips over {known.mesh.shape[at]} ranks"
                self._refuse(found, "Take as many trips as the mesh dimension has ranks")
        if abs(word.by) != 1:
            self._refuse(
                f"blocks would come from ranks {abs(word.by)} away", "Shift by 1 or -1: blocks pass between neighbours"
            )
        shifted = replace(known.loops[place], over=word.over, by=word.by)
        return (*known.loops[:place], shifted, *known.loops[place + 1 :])

    def _parts(self, axis: str) -> list[Range]:
        return [self.known.part(rank, axis) for rank in range(self.known.mesh.ranks)]

    def _check_axis(self, axis: str) -> None:
        if axis not in self.known.extents:
            self._refuse(f"there is no axis {axis}", f"Name one of {', '.join(self.known.extents)}")

    def _check_numbers(self, *numbers: int) -> None:
        if any(type(one) is not int or one < 0 for one in numbers):
            self._refuse("a number of it is not whole, or below 0", "Give whole numbers from 0 on")

    def _check_mesh(self, at: int) -> None:
        self._check_numbers(at)
        if not 0 <= at < len(self.known.mesh.shape):
            self._refuse(f"the mesh has no dimension {at}", f"Use 0 to {len(self.known.mesh.shape) - 1}")

    def _refuse(self, found: str, cure: str) -> NoReturn:
        raise InputError(self.asked, found, cure)


def _shown(word: object) -> str:
    fields = {field: getattr(word, field) for field in getattr(word, "__struct_fields__", ())}
    said = (f"{field}={value!r}" for field, value in fields.items() if value not in (0, ()))
    names: dict[type, str] = {BlockLoop: "loop", Keep: "buffer"}
    name = names.get(type(word), type(word).__name__.lower())
    return f"{name}({', '.join(said)})"[:100]
