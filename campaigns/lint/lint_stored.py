"""Tiles that store at peers as they are compiled and linted: a matmul's case, with what these are given beside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from msgspec.structs import replace

from campaigns.lint.lint_case import SCALED, SUM, Case, Variant, descriptor_type
from overweave.compiler.ptx_lint.contract import Guard
from overweave.ir.dtype import FLOAT8, Dtype
from overweave.ir.epilogue import NO_EPILOGUE, Epilogue
from overweave.ir.plan import TILE_KERNEL, MatmulConfig
from overweave.ir.problem import Problem
from overweave.ir.words import MOST_PEERS
from overweave.runtime.gpu.kernels.matmul import hopper_strip
from overweave.schedules.finished import shapes_of_tiles
from overweave.schedules.methods.record import Adds
from overweave.schedules.tiles.shape import Kernel, shapes

FINISHED = Epilogue(bias=True, activation="silu", residual=True)
OURS = Problem(operator="matmul_all_reduce", m=1024, n=1024, k=1024, world_size=4, dtype="bfloat16")


class Stored(NamedTuple):
    """A matmul that adds so many addends, and stores at so many peers: products alone, or sums of one addend too
    (`spreads`).
    """

    dtype: Dtype
    config: MatmulConfig
    addends: int
    peers: int
    spreads: bool = False
    variant: Variant = SUM
    epilogue: Epilogue = NO_EPILOGUE


def stored_tiles(kernel: Kernel) -> Iterator[Stored]:
    """Beside sums that stay, and beside such as go everywhere; of one peer and of seven; with all that may follow."""
    for shape in shapes("bfloat16", kernel):
        yield Stored("bfloat16", shape.config, 3, 3)
        for spreads in (False, True):
            yield Stored("bfloat16", shape.config, 1, 3, spreads)
    first, traced = shapes("bfloat16", kernel)[0].config, SUM._replace(traced=True)
    yield Stored("bfloat16", first, 0, 7)
    yield Stored("bfloat16", first, 1, 1, True, traced)
    yield Stored("bfloat16", first, 7, 7, variant=traced)
    for config in _of(kernel, replace(OURS, epilogue=FINISHED)):
        yield Stored("bfloat16", config, 1, 3, True, epilogue=FINISHED)
    scaled, alone = replace(FINISHED, scaling="rows"), SCALED._replace(two_sources=False)
    by_rows = _of(kernel, replace(OURS, dtype=FLOAT8, epilogue=scaled))[0]
    for addends in (3, 1):
        yield Stored(FLOAT8, by_rows, addends, 3, addends == 1, alone, scaled)


def _of(kernel: Kernel, problem: Problem) -> tuple[MatmulConfig, ...]:
    return tuple(shape.config for shape in shapes_of_tiles(problem, kernel, Adds(TILE_KERNEL, "ring"), "epilogue"))


def at_no_peer(kernel: Kernel) -> dict[str, int | str | None]:
    """What a kernel is given whose tiles all stay."""
    given: dict[str, int | str | None] = dict.fromkeys(("peers", "everyone"))
    maps = _maps("tiles", MOST_PEERS) + _maps("sums", MOST_PEERS)
    return given | (dict.fromkeys(maps) | {"PEERS": 0} if kernel == "hopper" else {})


def at_peers(plain: Case, tile: Stored) -> Case:
    """The same matmul, of which tiles store at peers. Of a sum that is stored at every rank, all peers are told."""
    source, contract = plain
    is_hopper = tile.config.kernel == "hopper"
    more = {"peers": "*i64"} | ({"everyone": "i32"} if tile.spreads else {})
    maps = _maps("tiles", tile.peers) + (_maps("sums", tile.peers) if tile.spreads else [])
    if is_hopper:
        more |= dict.fromkeys(maps, descriptor_type("bfloat16", hopper_strip(tile.config), True))
    constexprs = {name: value for name, value in source.constexprs.items() if name not in more}
    told = (Guard("*peers", (*contract.announced[0].data, *(maps if is_hopper else ())), optional=True),)
    label = f"{source.config} {tile.peers} peers{' spread' * tile.spreads}"
    return Case(
        replace(
            source,
            signature={**source.signature, **more},
            constexprs=constexprs | ({"PEERS": tile.peers} if is_hopper else {}),
            attrs={**source.attrs, "peers": 16},
            config=label,
        ),
        replace(contract, announced=told, releases=2 if is_hopper and tile.spreads else 1),
    )


def _maps(what: str, peers: int) -> list[str]:
    """The arguments for tensor maps of so many peers."""
    return [f"{what}_{index}" for index in range(1, peers + 1)]
