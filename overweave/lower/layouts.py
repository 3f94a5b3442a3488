"""Where the elements of a tensor lie on a mesh of ranks: placements, as DTensor, GSPMD and Alpa write them.

A placement for each mesh dimension, outermost first: `S0` (a shard of the tensor's dimension 0, as `torch.chunk` deals
it), `R` (all of it), `P` (a partial sum). Two dimensions may shard the same one: the first then cuts, and the second
cuts what is left.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import Any

from msgspec import Struct

from overweave.errors import InputError
from overweave.hardware.machine import Machine
from overweave.ir.schedule import Range
from overweave.ir.shards import shard_rows

Placement = str  # R, P, or S and a dimension
Placements = tuple[Placement, ...]
TensorBox = tuple[Range, ...]  # of a tensor, one range for each dimension
MOST_AXES = 2
MOST_DEVICES = 65536  # of a GSPMD text

_DTENSOR = re.compile(
    r"_?(?:Strided)?(?:(S)(?:hard)?\(?(?:dim=)?(-?\d+).*\)?|(R)(?:eplicate)?(?:\(\))?|(P)(?:artial)?\(?(\w*)\)?)"
)
_NUMBERS = r"(\d+(?:,\d+)*)"
_GSPMD = re.compile(
    rf"\{{devices=\[{_NUMBERS}\](?:<=\[{_NUMBERS}\](?:T\({_NUMBERS}\))?|{_NUMBERS})( last_tile_dim_replicate)?\}}"
)


class RankMesh(Struct, frozen=True):
    """Ranks `0 .. prod(shape) - 1` in row-major order. machine: by whose links collectives are synthesized, and for
    which plans are realized; None: H200s."""

    shape: tuple[int, ...]
    machine: Machine | None = None

    @property
    def ranks(self) -> int:
        return prod(self.shape)

    def place(self, rank: int) -> tuple[int, ...]:
        """The coordinates of a rank."""
        return (rank,) if len(self.shape) == 1 else divmod(rank, self.shape[1])

    def rank(self, place: Sequence[int]) -> int:
        return place[0] if len(self.shape) == 1 else place[0] * self.shape[1] + place[1]

    def line(self, rank: int, axis: int) -> tuple[int, ...]:
        """The ranks that differ from one in no coordinate but that of an axis, in its order."""
        at = self.place(rank)
        return tuple(self.rank((*at[:axis], step, *at[axis + 1 :])) for step in range(self.shape[axis]))

    def lines(self, axis: int) -> list[tuple[int, ...]]:
        """All such groups of ranks."""
        return list(dict.fromkeys(self.line(rank, axis) for rank in range(self.ranks)))


def mesh_of(given: Any) -> RankMesh:
    """A mesh from a shape, a DeviceMesh of torch, or itself. Raises InputError for other dimensions."""
    shape = getattr(given, "shape", given)
    extents = (shape,) if isinstance(shape, int) else tuple(shape) if isinstance(shape, Sequence) else ()
    if not extents or any(type(extent) is not int for extent in extents):
        found = f"{given!r:.40} is no shape"
        raise InputError("mesh", found, "Give a number of ranks, a tuple of one or two, a DeviceMesh or a RankMesh")
    mesh = given if isinstance(given, RankMesh) else RankMesh(extents)
    asked = f"mesh {'x'.join(map(str, mesh.shape))}"
    if not 1 <= len(mesh.shape) <= MOST_AXES or any(extent < 1 for extent in mesh.shape):
        raise InputError(
            asked, f"{len(mesh.shape)} dimensions, or one without ranks", "Use one or two, each of a rank or more"
        )
    if mesh.ranks == 1:
        raise InputError(asked, "it has one rank, and nothing travels", "Call the matmul, or the attention, itself")
    if mesh.machine is not None and mesh.machine.gpus < mesh.ranks:
        raise InputError(asked, f"{mesh.machine.name} has {mesh.machine.gpus} GPUs", "Name a machine with as many")
    return mesh


def placements_of(name: str, written: Any, mesh: RankMesh, dims: int) -> Placements:
    """The placements of a tensor of so many dimensions.

    written: a placement for each mesh dimension, of DTensor or as its text (`Shard(0)`, `S(0)`, `S0`); GSPMD's text
    (`{devices=[2,1]<=[2]}`); or Alpa's (`S0R`: which mesh dimension cuts which of the tensor). Raises InputError.
    """
    if isinstance(written, str) and written.startswith("{"):
        return _of_gspmd(name, written, mesh, dims)
    if (
        isinstance(written, str)
        and re.fullmatch(r"(R|S\d+)+", written)
        and len(re.findall("[RS]", written)) == dims > 1
    ):
        return _of_alpa(name, written, mesh)
    each = [written] if isinstance(written, str) or not isinstance(written, Sequence) else [*written]
    asked = f"{name}={_shown(written)}"
    if len(each) != len(mesh.shape):
        cure = "Give one for each dimension of the mesh"
        raise InputError(asked, f"{len(each)} placements on a mesh of {len(mesh.shape)} dimensions", cure)
    return tuple(_of_dtensor(asked, one, dims) for one in each)


def _of_dtensor(asked: str, one: Any, dims: int) -> Placement:
    text = str(one)
    match = _DTENSOR.fullmatch(text)
    if match is None or text.startswith("_Strided"):
        raise InputError(asked, f"placement {text[:40]!r}", "Use Shard(dimension), Replicate() or Partial()")
    shard, dim, _, partial, kind = match.groups()
    if partial:
        if kind not in ("", "sum"):
            raise InputError(
                asked, f"a partial {kind}", "Use Partial(): only sums are products' parts; reduce it before"
            )
        return "P"
    if not shard:
        return "R"
    if not -dims <= int(dim) < dims:
        raise InputError(asked, f"a shard of dimension {dim} of {dims}", f"Use 0 to {dims - 1}")
    return f"S{int(dim) % dims}"


def _of_alpa(name: str, written: str, mesh: RankMesh) -> Placements:
    """`S01R`: dimension 0 of the tensor is cut by mesh dimension 0, then by 1."""
    found: dict[int, Placement] = {}
    for dim, (kind, axes) in enumerate(re.findall(r"(R|S)(\d*)", written)):
        for axis in map(int, axes if kind == "S" else ""):
            if axis >= len(mesh.shape):
                cure = f"Use 0 to {len(mesh.shape) - 1}"
                raise InputError(f"{name}={written}", f"mesh dimension {axis} of {len(mesh.shape)}", cure)
            if axis in found:
                raise InputError(
                    f"{name}={written}", f"mesh dimension {axis} cuts it twice", "Name each dimension once"
                )
            found[axis] = f"S{dim}"
        if list(axes) != sorted(axes):
            raise InputError(f"{name}={written}", "a later mesh dimension cuts first", "Name mesh dimensions in order")
    return tuple(found.get(axis, "R") for axis in range(len(mesh.shape)))


def _of_gspmd(name: str, written: str, mesh: RankMesh, dims: int) -> Placements:
    """The placements by which every rank has the tile that GSPMD assigns to it."""
    asked = f"{name}={written[:80]}"
    if written == "{replicated}":
        return ("R",) * len(mesh.shape)
    match = _GSPMD.fullmatch(written)
    if match is None:
        raise InputError(asked, "no sharding that can be read", "Write {replicated} or {devices=[2,1]<=[2]}")
    tiles, iota, turned, listed, has_rest = match.groups()
    counts = [int(count) for count in tiles.split(",")]
    devices = _devices(iota, turned, listed) if prod(counts) == mesh.ranks else []
    if len(counts) != dims + bool(has_rest) or sorted(devices) != list(range(mesh.ranks)) or prod(counts) != mesh.ranks:
        wrong = f"{counts} tiles of {len(devices)} devices, for {dims} dimensions on {mesh.ranks} ranks"
        raise InputError(asked, wrong, "Name each rank of the mesh once, and a count for each dimension")
    tile = dict(zip(devices, product(*map(range, counts)), strict=True))
    choices = ("R", *(f"S{dim}" for dim in range(dims)))
    for tried in product(choices, repeat=len(mesh.shape)):
        if all(
            _tile(mesh, rank, tried, dims) == (tile[rank][:dims], tuple(counts[:dims])) for rank in range(mesh.ranks)
        ):
            return tried
    raise InputError(
        asked, f"its tiles do not follow the dimensions of mesh {mesh.shape}", "Use a mesh that they follow"
    )


def _devices(iota: str | None, turned: str | None, listed: str | None) -> list[int]:
    """GSPMD's order of devices: listed, or counted in a shape whose dimensions are turned; of no such turn none."""
    if iota is None:
        return [int(device) for device in (listed or "").split(",")]
    shape = [int(extent) for extent in iota.split(",")]
    order = [int(dim) for dim in turned.split(",")] if turned else list(range(len(shape)))
    if sorted(order) != list(range(len(shape))) or prod(shape) > MOST_DEVICES:
        return []
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    at = product(*(range(shape[dim]) for dim in order))
    return [sum(step * strides[dim] for dim, step in zip(order, steps, strict=True)) for steps in at]


def _tile(mesh: RankMesh, rank: int, placements: Placements, dims: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which tile of a tensor a rank has, and of how many, by dimension."""
    at, of = [0] * dims, [1] * dims
    for axis, place in enumerate(placements):
        if place[0] == "S":
            dim = int(place[1:])
            at[dim] = at[dim] * mesh.shape[axis] + mesh.place(rank)[axis]
            of[dim] *= mesh.shape[axis]
    return tuple(at), tuple(of)


def box_of(extents: Sequence[int], placements: Placements, mesh: RankMesh, rank: int) -> TensorBox:
    """The ranges of a tensor that a rank has."""
    ranges: list[Range] = [(0, extent) for extent in extents]
    for axis, place in enumerate(placements):
        if place[0] == "S":
            lo, hi = ranges[int(place[1:])]
            first, last = shard_rows(hi - lo, mesh.shape[axis], mesh.place(rank)[axis])
            ranges[int(place[1:])] = (lo + first, lo + last)
    return tuple(ranges)


class Change(Struct, frozen=True):
    """One step of a redistribution: along a mesh axis, from one placement to the next. before, after: of all axes."""

    axis: int
    before: Placements
    after: Placements

    @property
    def kind(self) -> str:
        """What it is among the ranks of the axis; `slice`: every rank keeps a part of what it has."""
        old, new = self.before[self.axis][0], self.after[self.axis][0]
        kinds = {"SR": "all_gather", "PR": "all_reduce", "PS": "reduce_scatter", "SS": "all_to_all", "RS": "slice"}
        return kinds[old + new]


def changes(before: Placements, after: Placements) -> Iterator[Change]:
    """The steps from one list of placements to another: what is cut last is gathered first."""
    now = before
    while now != after:
        axis, place = _next_change(now, after)
        then = (*now[:axis], place, *now[axis + 1 :])
        yield Change(axis, now, then)
        now = then


def _next_change(now: Placements, after: Placements) -> tuple[int, Placement]:
    for axis in reversed(range(len(now))):
        old, new = now[axis], after[axis]
        outer = [pair for pair in zip(now[:axis], after[:axis], strict=True) if pair[0] != pair[1]]
        if old[0] == "S" and (old != new or any(old in pair for pair in outer)):
            is_alone = not any(place in (old, new) for pair in outer for place in pair)
            is_last = not {old, new} & set(now[axis + 1 :])
            return axis, new if old != new and new[0] == "S" and is_alone and is_last else "R"
    return next((axis, new) for axis, (old, new) in enumerate(zip(now, after, strict=True)) if old != new)


def _shown(written: Any) -> str:
    return (
        str(written)
        if isinstance(written, str)
        else f"({', '.join(map(str, written))})"
        if isinstance(written, Sequence)
        else str(written)
    )[:80]
