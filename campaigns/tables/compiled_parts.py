"""The parts of the campaign: each yields the rows of one unit of work after the other, all of them collective."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from campaigns.lint.authored_cases import AUTHORS, KERNELS
from campaigns.tables.compiled_layer import Layer, quickest
from campaigns.tables.compiled_variants import (
    AUTOMATIC,
    BY_HAND,
    GATHER,
    PIECES,
    PROGRAMS,
    SCHEDULES,
    SHAPES,
    TENSORS,
    TILE,
    Shape,
    Tile,
    Variant,
    Way,
    backends,
    configs,
    streamed,
    tiles,
)
from campaigns.tables.table_rows import BEST, CHOSEN, COMPILED, LIBRARY, MATMUL, PORTABLE, TORCH, Row
from overweave.memory.group import Group
from overweave.ops.author.compile_auto import compile_auto
from overweave.tuner.measure.baselines import TORCH_FUSED, methods_of
from overweave.tuner.measure.timer import Effort, capture_graphs
from overweave.tuner.measure.trial import CheckedCall
from overweave.tuner.space.shapes import ShapeCase

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
    from campaigns.choices.split_gather import SplitGather, by_kernel, by_library

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
