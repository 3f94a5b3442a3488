"""What the tables of compiled kernels vary, as data: tiles, schedules, chunks, SMs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from overweave.schedules.communication import COPYING_KERNELS
from overweave.schedules.weave.transports import legal

GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"
TENSORS = {GATHER: "A", SCATTER: "C"}  # what of the kernel is exchanged
AUTOMATIC = {GATHER: "all_gather.auto", SCATTER: "reduce_scatter.auto"}
STUDIED = "MLP-2"  # whose tables are taken


class Tile(NamedTuple):
    """An annotated matmul of examples/kernels with its constants. group: blocks of rows that run together."""

    kernel: str
    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    group: int

    def __str__(self) -> str:
        return f"{self.kernel} {self.shape} warps={self.warps} stages={self.stages} group={self.group}"

    @property
    def shape(self) -> str:
        return f"{self.block_m}x{self.block_n}x{self.block_k}"

    @property
    def constants(self) -> dict[str, int]:
        """As a call of the compiled kernel takes them."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "num_warps": self.warps,
            "num_stages": self.stages,
            "tile_group": self.group,
        }


class Way(NamedTuple):
    """How a compiled kernel runs."""

    schedule: str
    tile: Tile

    def __str__(self) -> str:
        return f"{self.schedule}; {self.tile}"


class Variant(NamedTuple):
    """A point of a table: its line, its place there, and what runs."""

    series: str
    x: str
    way: Way


TILE = Tile("matmul", 128, 256, 64, 8, 4, 16)
Shape = tuple[int, int, int, int, tuple[int, ...]]  # rows, columns, step of k, warps, and the stages to try
# As many stages as shared memory holds, and fewer where registers could be what is short.
SHAPES: tuple[Shape, ...] = (
    (128, 256, 64, 8, (3, 4)),
    (256, 128, 64, 8, (3, 4)),
    (128, 128, 64, 8, (3, 4, 5)),
    (128, 128, 64, 4, (3, 4)),
    (64, 256, 64, 8, (3, 4)),
    (128, 256, 32, 8, (4, 6)),
)
GROUPS = (4, 8, 16, 32)
# Those that are tried of each case before it is compared.
CANDIDATES = (
    TILE,
    TILE._replace(stages=3),
    TILE._replace(block_m=256, block_n=128, group=8),
    TILE._replace(block_n=128, stages=5),
    TILE._replace(kernel="persistent"),
    TILE._replace(kernel="persistent", block_m=256, block_n=128, group=8),
)
SCHEDULES = {
    GATHER: ("all_gather.push pieces=2", "all_gather.push pieces=1", "all_gather.push pieces=4"),
    SCATTER: ("reduce_scatter.scatter pieces=2", "reduce_scatter.scatter pieces=1", "reduce_scatter.scatter pieces=4"),
}
BY_HAND = {
    GATHER: tuple(f"push pieces={pieces} kernel=portable" for pieces in (1, 2, 4)),
    SCATTER: tuple(f"scatter pieces={pieces} own_pieces=4 kernel=portable" for pieces in (1, 2, 4)),
}
PIECES, PROGRAMS = (1, 2, 4, 8), (8, 16, 32)
NAMES = {
    "copy_engine": "copy engine",
    "copy_kernel": "load/store, own SMs",
    "bulk_kernel": "bulk, own SMs",
    "tiles": "load/store, between tiles",
    "bulk_tiles": "bulk, between tiles",
}


def backends(
    operator: str, tile: Tile, tried: tuple[int, ...] = PIECES, programs: tuple[int, ...] = PROGRAMS
) -> Iterator[Variant]:
    """Every back end with every number of pieces and, where it has SMs of its own, of those."""
    name = SCHEDULES[operator][0].split()[0]
    for mover, pieces in product(legal(name), tried):
        for count in programs if mover in COPYING_KERNELS else (0,):
            words = f"{name} pieces={pieces} mover={mover}" + (f" copy_programs={count}" if count else "")
            yield Variant(f"{NAMES[mover]} ({count})" if count else NAMES[mover], str(pieces), Way(words, tile))
    if operator == SCATTER:
        for pieces in tried:
            yield Variant("ring, copy engine", str(pieces), Way(f"reduce_scatter.ring pieces={pieces}", tile))
    yield Variant("NCCL, not overlapped", "1", Way(f"{name.split('.')[0]}.collective", tile))


def tiles(operator: str, shapes: tuple[Shape, ...]) -> Iterator[Variant]:
    """Every tile shape with its stages, in every order."""
    for block_m, block_n, block_k, warps, depths in shapes:
        for stages, group in product(depths, GROUPS):
            tile = Tile("matmul", block_m, block_n, block_k, warps, stages, group)
            series = f"{tile.shape}, {warps} warps, {stages} stages"
            yield Variant(series, str(group), Way(SCHEDULES[operator][0], tile))


def streamed(ranks: int, tile: Tile, tried: tuple[int, ...]) -> Iterator[Variant]:
    """One kernel, and more and more chunks of the gathered rows: the pieces of a shard, and twice the most."""
    for pieces in (*tried, 2 * tried[-1]):
        way = Way(f"all_gather.push pieces={pieces}", tile)
        yield Variant("streamed: one kernel", str(ranks * pieces), way)


def configs(shapes: tuple[Shape, ...]) -> list[dict[str, int]]:
    """What the tuner may choose among within a chunk: the tiles of the table, in the two orders that suit waves."""
    return [
        Tile("matmul", block_m, block_n, block_k, warps, depths[-1], group).constants
        for block_m, block_n, block_k, warps, depths in shapes
        for group in (8, 16)
    ]
