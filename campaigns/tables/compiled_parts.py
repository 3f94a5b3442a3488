"""The parts of the campaign: each yields the rows of one unit of work after the other, all of them collective."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from msgspec.structs import replace
from triton.tools.tensor_descriptor import TensorDescriptor

from campaigns.lint.authored_cases import AUTHORS, KERNELS
from campaigns.tables.table_rows import BEST, CHOSEN, COMPILED, LIBRARY, MATMUL, PORTABLE, TORCH, Row
from examples.kernels.matmul import matmul_kernel
from overweave.memory.cuda import driver
from overweave.memory.cuda.heap import CudaHeap
from overweave.memory.group import Group
from overweave.ops.author.compile import FusedKernel, compile
from overweave.ops.author.compile_auto import compile_auto
from overweave.ops.operators import operator_for
from overweave.schedules.communication import COPYING_KERNELS
from overweave.schedules.weave.transports import legal
from overweave.tuner.measure.baselines import TORCH_FUSED, BenchSide, Setting, methods_of
from overweave.tuner.measure.timer import Effort, capture_graphs, median, p90
from overweave.tuner.measure.trial import CheckedCall, TimedTrial
from overweave.tuner.space.shapes import ShapeCase

# What the tables of compiled kernels vary, as data: tiles, schedules, chunks, SMs.

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


# One matmul of an operator with everything that is timed on it: compiled kernels, plans by hand, and the baselines.

CONSTANTS: dict[str, int] = {"GROUP_M": 8}  # of the kernel's own order, which a fused kernel does not keep
SMS = 132  # where there is no GPU to ask
# The second call with the same tensors in a slot is captured; from the third on it is one launch.
SLOTS, CALLS_OF_A_GRAPH = 2, 3


class Layer:
    """A case of the shape set, as this rank has it. Collective: all ranks make the same one."""

    def __init__(self, operator: str, case: ShapeCase, group: Group, device: torch.device) -> None:
        setting = Setting(group, device, torch.bfloat16, operator_for)
        self.operator, self.name, self.setting = operator, case.name, setting
        self.side: BenchSide = BenchSide(case.problem(operator, group.world_size, "bf16"), setting)
        rows = case.m if operator == GATHER else self.side.rows[1] - self.side.rows[0]
        (k, n), m = self.side.rights[0].shape, case.m
        self.sizes: tuple[int, int, int] = (m, n, k)
        self.out = torch.empty(rows, n, dtype=setting.dtype, device=device)
        self._turned: list[torch.Tensor] = []
        self._described: dict[tuple[Tile, int], tuple[TensorDescriptor, ...]] = {}

    @property
    def shape(self) -> str:
        return "x".join(map(str, self.sizes))

    @property
    def sets(self) -> int:
        """How many inputs there are; calls take them by turns."""
        return len(self.side.rights)

    def compiled(self, way: Way) -> CheckedCall:
        """The compiled kernel. It is compiled and bound as the call is made first."""
        fused = fused_of(way.tile.kernel, TENSORS[self.operator], way.schedule)
        group = self.setting.group.process_group

        def call(turn: int) -> torch.Tensor:
            fused(*self.arguments(way.tile, turn), group=group, **self.named(way.tile), **way.tile.constants)
            return self.out

        return call

    def planned(self, plan: str) -> CheckedCall:
        """Our operator with a plan by name."""
        return lambda turn: self.side.ours(turn, plan)

    def named(self, tile: Tile) -> dict[str, int]:
        """Further constants of a tile's kernel."""
        if tile.kernel != "persistent":
            return CONSTANTS
        is_cuda = self.setting.device.type == "cuda"
        sms = torch.cuda.get_device_properties(self.setting.device).multi_processor_count if is_cuda else SMS
        return CONSTANTS | {"NUM_SMS": sms}

    def arguments(self, tile: Tile, turn: int) -> tuple[Any, ...]:
        """Of a tile's kernel, but for its constants. `persistent` has its weights the other way round in memory."""
        index, (m, n, k) = turn % self.sets, self.sizes
        if tile.kernel == "persistent":
            return (*self._descriptors(tile, index), m, n, k)
        return (self.side.xs[index], self.side.rights[index], self.out, m, n, k, k, 1, n, 1, n, 1)

    def _descriptors(self, tile: Tile, index: int) -> tuple[TensorDescriptor, ...]:
        if not self._turned:
            self._turned = [weight.t().contiguous() for weight in self.side.rights]
        key = (tile, index)
        if key not in self._described:
            blocks = ((tile.block_m, tile.block_k), (tile.block_n, tile.block_k), (tile.block_m, tile.block_n))
            tensors = (self.side.xs[index], self._turned[index], self.out)
            self._described[key] = tuple(
                TensorDescriptor.from_tensor(tensor, list(block)) for tensor, block in zip(tensors, blocks, strict=True)
            )
        return self._described[key]

    def times(
        self, calls: Mapping[str, CheckedCall], effort: Effort, roofs: Sequence[str] = ()
    ) -> dict[str, tuple[float, ...]]:
        """Samples in paired rounds, of those that run on every rank and, but for roofs, compute what the library does.

        What is left out is told. Collective.
        """
        if self.setting.device.type == "cuda":
            effort = replace(effort, warmup=max(effort.warmup, CALLS_OF_A_GRAPH * self.sets * SLOTS))
        trial = TimedTrial(self.setting, effort, self.side.sequential(0))
        samples = trial.times(calls, roofs)
        for name, reason in trial.left_out.items():
            if self.setting.group.rank == 0:
                print(f"  left out at {self.operator} {self.name}: {name}: {reason}", flush=True)
        return samples.device_us

    def row(self, table: str, point: tuple[str, str, str], samples: Sequence[float]) -> Row:
        """point: the line, the place on it, and what ran."""
        m, n, k = self.sizes
        us = median(samples)
        return Row(table, self.operator, self.shape, *point, us, p90(samples), 2 * m * n * k / us / 1e6)


@lru_cache(maxsize=256)
def fused_of(kernel: str, tensor: str, schedule: str) -> FusedKernel:
    """An annotated kernel of the examples with one exchange."""
    return compile(f"{KERNELS / kernel}.py:{AUTHORS[kernel].name}", {tensor: schedule})


def quickest(samples: Mapping[str, Sequence[float]]) -> str:
    """Whose median is the least."""
    return min(samples, key=lambda name: median(samples[name]))


# The other way to overlap: the same matmul cut into launches of one chunk each, each behind the copy of its chunk.
# Chunks are pulled by the copy engine on a stream of its own, straight from the peer's shard: nothing is signalled,
# the data is there before the first call. A call is captured, so that the host is not in its way.
# SOURCE: AutoOverlap, Figure 2b, the kernel-partitioned baseline.

Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]  # rows, weight, where the product goes


def by_kernel(tile: Tile) -> Multiply:
    """The author's kernel as it stands in its file."""
    constants = {**tile.constants, **CONSTANTS, "GROUP_M": tile.group}
    del constants["tile_group"]

    def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        (m, k), n = a.shape, b.shape[1]
        programs = -(-m // tile.block_m) * -(-n // tile.block_n)
        matmul_kernel[(programs,)](a, b, out, m, n, k, k, 1, n, 1, n, 1, **constants)

    return multiply


def by_library(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(a, b, out=out)


class SplitGather:
    """all_gather(x) @ w in `pieces` launches per shard. Collective."""

    def __init__(self, layer: Layer) -> None:
        self._layer, group = layer, layer.setting.group
        self._shard_bytes = layer.side.xs[0].nbytes
        self._heap = CudaHeap(group, layer.setting.device, layer.sets * self._shard_bytes)
        for index, x in enumerate(layer.side.xs):
            self._heap.view(index * self._shard_bytes, (x.shape[0], x.shape[1]), x.dtype).copy_(x)
        torch.cuda.synchronize()
        dist.barrier(group.process_group)  # nobody pulls what is not there
        self._gathered = torch.empty_like(layer.side.lefts[0])
        self._stream = torch.cuda.Stream(priority=-1)

    def call(self, pieces: int, multiply: Multiply) -> CheckedCall:
        """The rows of every shard must be pieces of equally many."""

        def run(turn: int) -> torch.Tensor:
            layer, main = self._layer, torch.cuda.current_stream()
            index = turn % layer.sets
            arrived = self._pull(index, pieces)
            for rank, piece, (lo, hi) in self._chunks(pieces):
                if (rank, piece) in arrived:
                    main.wait_event(arrived[rank, piece])
                a = self._gathered if rank != layer.setting.group.rank else layer.side.lefts[index]
                multiply(a[lo:hi], layer.side.rights[index], layer.out[lo:hi])
            main.wait_stream(self._stream)
            return layer.out

        return run

    def _chunks(self, pieces: int) -> list[tuple[int, int, tuple[int, int]]]:
        """(rank, piece, rows), the own ones first, then those of the next ranks."""
        group, (lo, hi) = self._layer.setting.group, self._layer.side.rows
        shard = hi - lo
        rows = shard // pieces
        ranks = [(group.rank + step) % group.world_size for step in range(group.world_size)]
        starts = [(rank, piece, rank * shard + piece * rows) for rank in ranks for piece in range(pieces)]
        return [(rank, piece, (low, low + rows)) for rank, piece, low in starts]

    def _pull(self, index: int, pieces: int) -> dict[tuple[int, int], torch.cuda.Event]:
        """Enqueues all copies; the event of each chunk that is a peer's."""
        self._stream.wait_stream(torch.cuda.current_stream())
        events: dict[tuple[int, int], torch.cuda.Event] = {}
        size = self._shard_bytes // pieces
        for rank, piece, (low, _) in self._chunks(pieces):
            if rank == self._layer.setting.group.rank:
                continue
            source = self._heap.addresses[rank] + index * self._shard_bytes + piece * size
            driver.copy(self._stream.cuda_stream, source, self._gathered[low:].data_ptr(), size, 1, (size, size))
            events[rank, piece] = torch.cuda.Event()
            events[rank, piece].record(self._stream)
        return events


MOST_COMPARED = 3  # of the best rows of the tables, beside the tuner's choice


class Scope(NamedTuple):
    """What is measured, and how hard. cases: of the comparison, by operator; studied: of the tables.

    candidates: tiles to choose from. shapes: of the table of tiles. tile: of tables that vary something else. pieces,
    programs: chunks of a shard and SMs of copying kernels to try.
    """

    group: Group
    device: torch.device
    cases: dict[str, tuple[ShapeCase, ...]]
    studied: dict[str, ShapeCase]
    candidates: tuple[Tile, ...]
    shapes: tuple[Shape, ...] = SHAPES
    tile: Tile = TILE
    pieces: tuple[int, ...] = PIECES
    programs: tuple[int, ...] = PROGRAMS
    quick: Effort = Effort(rounds=8, warmup=2, host_calls=0)
    full: Effort = Effort(rounds=30, warmup=4, host_calls=0)
    table: Effort = Effort(rounds=15, warmup=3, host_calls=0)

    def layer(self, operator: str) -> Layer:
        """That of the tables."""
        return Layer(operator, self.studied[operator], self.group, self.device)


Part = Callable[[Scope, Sequence[Row]], Iterator[list[Row]]]


def against(scope: Scope, known: Sequence[Row]) -> Iterator[list[Row]]:
    """Every case: the best tile and schedule of a few, beside the best plan of the portable kernel, and torch's."""
    for operator, cases in scope.cases.items():
        for case in cases:
            layer = Layer(operator, case, scope.group, scope.device)
            yield _compared(layer, scope)


def _compared(layer: Layer, scope: Scope) -> list[Row]:
    first, *others = SCHEDULES[layer.operator]
    ways = {str(way): way for way in (Way(first, tile) for tile in scope.candidates)}
    tried = layer.times({name: layer.compiled(way) for name, way in ways.items()}, scope.quick)
    best = ways[quickest(tried)] if tried else Way(first, scope.tile)
    ways = {str(way): way for way in (best, *(Way(schedule, best.tile) for schedule in others))}
    calls: dict[str, CheckedCall] = {name: layer.compiled(way) for name, way in ways.items()}
    calls |= {plan: layer.planned(plan) for plan in BY_HAND[layer.operator]}
    tried = layer.times(calls, scope.quick)
    sides = {COMPILED: ways, PORTABLE: BY_HAND[layer.operator]}
    ran = {series: {name: tried[name] for name in names if name in tried} for series, names in sides.items()}
    hows = {series: quickest(samples) for series, samples in ran.items() if samples}
    final: dict[str, CheckedCall] = {MATMUL: layer.side.matmul, LIBRARY: layer.side.sequential}
    if scope.device.type == "cuda":
        rows = {row.name: row for row in methods_of(layer.operator)}
        final[TORCH] = rows[TORCH_FUSED].of(layer.side)
    final |= {series: calls[how] for series, how in hows.items()}
    found = layer.times(final, scope.full, roofs=(MATMUL,))
    return [layer.row("against", (name, layer.name, hows.get(name, "")), samples) for name, samples in found.items()]


def backend_table(scope: Scope, known: Sequence[Row]) -> Iterator[list[Row]]:
    for operator in scope.studied:
        yield _table("backends", scope.layer(operator), _backends(operator, scope), scope)


def _backends(operator: str, scope: Scope) -> Iterator[Variant]:
    return backends(operator, scope.tile, scope.pieces, scope.programs)


def tile_table(scope: Scope, known: Sequence[Row]) -> Iterator[list[Row]]:
    for operator in scope.studied:
        yield _table("tiles", scope.layer(operator), tiles(operator, scope.shapes), scope)


def _table(table: str, layer: Layer, variants: Iterator[Variant], scope: Scope) -> list[Row]:
    by_how = {str(variant.way): variant for variant in variants}
    calls = {how: layer.compiled(variant.way) for how, variant in by_how.items()}
    found = layer.times(calls, scope.table)
    return [layer.row(table, (by_how[how].series, by_how[how].x, how), samples) for how, samples in found.items()]


def stream_table(scope: Scope, known: Sequence[Row]) -> Iterator[list[Row]]:
    """One kernel for all chunks beside one matmul per chunk, by the same kernel and by the library."""
    layer = scope.layer(GATHER)
    points: dict[str, tuple[str, str, str]] = {}
    calls: dict[str, CheckedCall] = {}
    for variant in streamed(scope.group.world_size, scope.tile, scope.pieces):
        points[str(variant.way)] = (variant.series, variant.x, str(variant.way))
        calls[str(variant.way)] = layer.compiled(variant.way)
    if scope.device.type == "cuda":
        for point, call in _split(layer, scope):
            points[" ".join(point)], calls[" ".join(point)] = point, call
    found = layer.times(calls, scope.table)
    yield [layer.row("streamed", points[name], samples) for name, samples in found.items()]


def _split(layer: Layer, scope: Scope) -> Iterator[tuple[tuple[str, str, str], CheckedCall]]:
    # Where there is no GPU there is no copy engine to import.
    from campaigns.tables.compiled_parts import SplitGather, by_kernel, by_library

    split = SplitGather(layer)
    ways = [
        ("split: a launch per chunk", str(scope.tile), by_kernel(scope.tile)),
        ("split: cuBLAS per chunk", "cuBLAS", by_library),
    ]
    for variant in streamed(scope.group.world_size, scope.tile, scope.pieces):
        for series, how, multiply in ways:
            call = split.call(int(variant.x) // scope.group.world_size, multiply)
            call(0)  # what is captured must have run
            yield (series, variant.x, how), capture_graphs(call)


def tuner_choice(scope: Scope, known: Sequence[Row]) -> Iterator[list[Row]]:
    """What the tuner takes, beside the best few of the tables, which are measured first where no file has them."""
    for operator in scope.studied:
        layer = scope.layer(operator)
        rows = _rows_of(known, layer)
        if not rows:
            rows = _table("backends", layer, _backends(operator, scope), scope)
        best = [row.how for row in sorted(rows, key=lambda row: row.us)[:MOST_COMPARED]]
        chosen = _chosen(layer, scope)
        calls = {how: layer.compiled(_way(how)) for how in dict.fromkeys((*best, chosen))}
        found = layer.times(calls, scope.full)
        if chosen in found and any(how in found for how in best):
            top = quickest({how: found[how] for how in best if how in found})
            points = ((CHOSEN, chosen), (BEST, top))
            yield [layer.row("tuner", (series, "time", how), found[how]) for series, how in points]


def _rows_of(known: Sequence[Row], layer: Layer) -> list[Row]:
    return [
        row
        for row in known
        if row.table in ("backends", "tiles") and (row.operator, row.shape) == (layer.operator, layer.shape)
    ]


def _chosen(layer: Layer, scope: Scope) -> str:
    """Tunes, and says what came out as the tables do. On a CPU the model says it."""
    tile, started = scope.tile, time.monotonic()
    fused = compile_auto(
        f"{KERNELS / tile.kernel}.py:{AUTHORS[tile.kernel].name}",
        {TENSORS[layer.operator]: AUTOMATIC[layer.operator]},
        configs=configs(scope.shapes),
    )
    times = fused.tune(*layer.arguments(tile, 0), group=layer.setting.group.process_group, **layer.named(tile))
    if layer.setting.group.rank == 0:
        print(f"  {layer.operator}: tuned in {time.monotonic() - started:.1f} s", flush=True)
        for one in times[:8]:
            print(f"    {one.us:8.1f} us  {one.way}", flush=True)
    way = times[0].way
    return str(Way(dict(way.exchanges)[TENSORS[layer.operator]], _tile(dict(way.constants))))


def _tile(constants: dict[str, int]) -> Tile:
    names = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages", "tile_group")
    return Tile(TILE.kernel, *(constants[name] for name in names))


def _way(how: str) -> Way:
    """What a row says ran."""
    schedule, _, tile = how.partition("; ")
    kernel, shape, *named = tile.split()
    return Way(schedule, Tile(kernel, *map(int, shape.split("x")), *(int(one.split("=")[1]) for one in named)))
