"""What is studied: one choice of a schedule varied, all else alike. A study is a row of STUDIES.

SOURCE: Flux (arXiv 2406.06858) figures 8 to 10 for rotation, pull against push and the size of a chunk; TileLink (arXiv
2503.20313) for the SMs that communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec import Struct

from overweave.schedules.catalog.options import PIECES
from overweave.tuner.space.shapes import Case

GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"
PUSHES = {GATHER: "push", SCATTER: "scatter"}
TILE_ROWS = 128
PROGRAMS = (4, 8, 12, 16, 24, 32)


class Layer(Struct, frozen=True):
    """An MLP of `rows` tokens: its first matmul gathers, its second one scatters."""

    rows: int
    hidden: int
    intermediate: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.hidden}x{self.intermediate}"

    def case(self, operator: str) -> Case:
        """The global matmul of an operator."""
        n, k = (self.intermediate, self.hidden) if operator == GATHER else (self.hidden, self.intermediate)
        return Case(name=str(self), m=self.rows, n=n, k=k)


class Variant(Struct, frozen=True):
    """One point: the line it belongs to, where it stands on the axis, and the plan that is timed for it."""

    series: str
    x: str
    plan: str


class Study(Struct, frozen=True, kw_only=True):
    """variants: of an operator, by rows of a shard, in the order of the axis."""

    title: str
    axis: str
    variants: Callable[[str, int], Iterator[Variant]]


class Point(Struct, frozen=True, kw_only=True):
    """A line of the table: a variant's times beside the roofs of the same run, in microseconds. None: left out."""

    study: str
    operator: str
    layer: str
    world_size: int
    device: str
    series: str
    x: str
    plan: str
    median_us: float | None
    p90_us: float | None
    efficiency: float | None
    matmul_us: float
    communication_us: float
    sequential_us: float
    ceiling_us: float | None


def _rotation(operator: str, shard: int) -> Iterator[Variant]:
    methods = (PUSHES[operator], *(("pull",) if operator == GATHER else ()))
    for rotation in ("on", "off"):
        for method in methods:
            for order in ("ring", "all_peers"):
                plan = f"{method} pieces={_pieces(shard)[:2][-1]} order={order} rotation={rotation}"
                yield Variant(f"{method}, {order}", rotation, plan)


def _direction(operator: str, shard: int) -> Iterator[Variant]:
    for pieces in _pieces(shard)[:4] if operator == GATHER else ():
        for method in ("push", "pull"):
            yield Variant(method, str(-(-shard // pieces)), f"{method} pieces={pieces}")


def _piece_size(operator: str, shard: int) -> Iterator[Variant]:
    for pieces in _pieces(shard):
        for mover in ("copy_engine", "copy_kernel"):
            plan = f"{PUSHES[operator]} pieces={pieces} mover={mover}"
            yield Variant(mover, str(-(-shard // pieces)), plan)


def _programs(operator: str, shard: int) -> Iterator[Variant]:
    several = _pieces(shard)[:3][-1]
    for pieces in dict.fromkeys((1, several)):
        yield Variant(f"pieces={pieces}", "copy engine", f"{PUSHES[operator]} pieces={pieces}")
    for programs in PROGRAMS:
        for pieces in dict.fromkeys((1, several)):
            plan = f"{PUSHES[operator]} pieces={pieces} mover=copy_kernel copy_programs={programs}"
            yield Variant(f"pieces={pieces}", str(programs), plan)


def _pieces(shard: int) -> list[int]:
    """1, 2, 4, ... pieces, until one is a tile high, or there are as many as schedules take."""
    found = [1]
    while shard > TILE_ROWS * found[-1] and 2 * found[-1] <= PIECES.high:
        found.append(2 * found[-1])
    return found


STUDIES = {
    "rotation": Study(title="Each rank begins elsewhere, or all with rank 0", axis="rotation", variants=_rotation),
    "direction": Study(title="Push against pull", axis="rows of a chunk", variants=_direction),
    "pieces": Study(title="From a shard to a tile", axis="rows of a chunk", variants=_piece_size),
    "programs": Study(title="SMs that communicate", axis="SMs of the copy kernel", variants=_programs),
}
