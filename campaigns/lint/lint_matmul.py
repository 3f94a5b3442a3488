"""The tile kernels of a matmul as they are compiled and linted, with the arguments of a launch and their contracts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from campaigns.lint.lint_case import PLAIN, Case, Variant, case_of, tiles_of
from overweave.ir.dtype import FLOAT8, Dtype
from overweave.ir.epilogue import NO_EPILOGUE, Epilogue
from overweave.ir.operators.forms import GATE, SCALE_W, SCALE_X
from overweave.ir.plan import MatmulConfig
from overweave.kernels.arguments import ExpertRows
from overweave.runtime.kernel_calls.call import KernelCall, Peers
from overweave.runtime.kernel_calls.matmul import Operands, matmul_call
from tools.ptx_lint.contract import Guard

# Sizes are no matter but for what a launch specialises for: whether they are multiples of 16.
TILES, ROWS = 7, 512
SIZE, RAGGED_SIZE = 1024, 1032


class Stored(NamedTuple):
    """At how many peers tiles store: products alone, or sums of one addend too (`spreads`)."""

    peers: int = 0
    spreads: bool = False

    def __str__(self) -> str:
        return f"{self.peers} peers{' spread' * self.spreads}" if self.peers else ""


STAYS = Stored()


class ByExperts(NamedTuple):
    """Whether tiles name one of many experts; whether their rows are gathered, scattered and weighted."""

    are: bool = False
    gathers: bool = False
    scatters: bool = False
    weighs: bool = False

    def __str__(self) -> str:
        words = {"experts": self.are, "gathers": self.gathers, "scatters": self.scatters, "weighs": self.weighs}
        return " ".join(word for word, holds in words.items() if holds)


ONE_WEIGHT = ByExperts()


class Tile(NamedTuple):
    """A matmul's tile. addends: how many each adds. weights: by how many each launch multiplies."""

    dtype: Dtype
    config: MatmulConfig
    variant: Variant = PLAIN
    epilogue: Epilogue = NO_EPILOGUE
    addends: int = 0
    weights: int = 1
    stored: Stored = STAYS
    experts: ByExperts = ONE_WEIGHT

    def __str__(self) -> str:
        config = self.config
        parts = f"/{config.split_n}" * (config.split_n > 1)
        shape = f"{config.block_m}x{config.block_n}x{config.block_k} {config.warps}w{config.stages}s{parts}"
        added = f"{self.addends} addend{'s' * (self.addends > 1)}" if self.addends else ""
        several = f"{self.weights} weights" if self.weights > 1 else ""
        words = (f"{self.dtype} {shape}", self.variant, self.epilogue, added, several, self.stored, self.experts)
        return " ".join(filter(None, map(str, words)))


def matmul_case(
    dtype: Dtype,
    config: MatmulConfig,
    variant: Variant = PLAIN,
    epilogue: Epilogue = NO_EPILOGUE,
    addends: int = 0,
    weights: int = 1,
    stored: Stored = STAYS,
    experts: ByExperts = ONE_WEIGHT,
) -> Case:
    """The case of a `Tile`, whose fields these are."""
    tile = Tile(dtype, config, variant, epilogue, addends, weights, stored, experts)
    return case_of(call_of(tile), str(tile), **_promises(tile))


def call_of(tile: Tile) -> KernelCall:
    """Its launch."""
    tiles = tiles_of(tile.variant.traced)
    if tile.experts.are:
        tiles = tiles._replace(queue=tiles.queue._replace(tiles=tiles.queue.claims))
    return matmul_call(tile.config, operands_of(tile), tiles)


def operands_of(tile: Tile) -> Operands:
    """Tensors of which a launch sees no more than dtype, alignment and strides."""
    size = RAGGED_SIZE if tile.variant.ragged else SIZE
    dtype = getattr(torch, tile.dtype)
    kept = torch.bfloat16 if tile.dtype == FLOAT8 else dtype
    a, out, epilogue = torch.empty(ROWS, size, dtype=dtype), torch.empty(ROWS, size, dtype=kept), tile.epilogue
    b = torch.empty((*(3,) * tile.experts.are, size, size), dtype=dtype)
    b = b.transpose(-2, -1) if tile.variant.is_transposed else b
    scales, addresses = torch.empty(ROWS), torch.empty(TILES, max(1, tile.addends), dtype=torch.int64)
    distances = tuple(4096 * steps for steps in range(1, tile.stored.peers + 1))
    return Operands(
        a_shard=a if tile.variant.two_sources else None,
        a_workspace=a,
        weights=((b, out),) * tile.weights,
        b_is_transposed=tile.variant.is_transposed,
        epilogue_inputs={name: scales if name in (SCALE_X, SCALE_W) else out for name in epilogue.inputs} | {GATE: b},
        scale_x=scales if epilogue.scaling == "rows" else None,
        scale_gathered=scales if epilogue.scaling == "rows" else None,
        epilogue=epilogue,
        total=out if tile.addends else None,
        addends=addresses if tile.addends else None,
        addend_rows=(out, addresses) if tile.addends == 1 else None,
        peers=Peers(addresses, distances, out if tile.stored.spreads else None) if distances else None,
        experts=_expert_rows(tile, a, scales) if tile.experts.are else None,
    )


def _expert_rows(tile: Tile, a: torch.Tensor, scales: torch.Tensor) -> ExpertRows:
    places, size = torch.empty(ROWS, dtype=torch.int32), a.shape[1]
    return ExpertRows(
        rows_per_expert=size,
        source=a if tile.experts.gathers else None,
        source_stride=size,
        source_rows_x2=2 * ROWS,
        row_index=places if tile.experts.gathers else None,
        out_index=places if tile.experts.scatters else None,
        out_rows_x2=2 * ROWS,
        row_scales=scales if tile.experts.weighs else None,
    )


def _promises(tile: Tile) -> dict[str, Any]:
    """Tensor cores are promised where the dtype has them."""
    is_hopper, peers = tile.config.kernel == "hopper", tile.stored.peers
    stores = [*_names("outputs.out", tile.weights), *(["outputs.total"] if tile.addends else [])]
    if is_hopper:
        stores += [*_names("out", tile.weights), *(["total_tiles"] if tile.addends else [])]
        stores += [f"tiles_{index}" for index in range(1, peers + 1)]
        stores += [f"sums_{index}" for index in range(1, peers + 1) if tile.stored.spreads]
    told = Guard("*peers.peer_table" if peers else "protocol.signals", tuple(stores), optional=True)
    guarded = [Guard("protocol.signals", ("a_workspace",) if tile.variant.two_sources else ("a_shard",), optional=True)]
    if tile.addends:  # one more wait, with its alarm's look
        names = "addend_tiles" if is_hopper and tile.addends == 1 else "*addends"
        guarded.append(Guard("protocol.signals", (names,), optional=True))
    return {
        "guarded": tuple(guarded),
        "announced": (told,),
        "waits": len(guarded),
        "looks": len(guarded),
        "releases": 2 if is_hopper and tile.stored.spreads else 1,
        "wgmma": tile.dtype != "float32",
        "depth": int(tile.dtype not in ("float32", FLOAT8)),  # of fp8, loads alone are ahead of a step's product
    }


def _names(base: str, weights: int) -> list[str]:
    """What belongs to each weight: `out`, `out_1`, `out_2`."""
    return [base, *(f"{base}_{index}" for index in range(1, weights))]
