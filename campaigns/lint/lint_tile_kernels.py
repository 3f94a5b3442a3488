"""Compiles the kernels of examples/tile_kernels for Hopper and lints the PTX. No GPU is needed.

    python -m campaigns.lint_tile_kernels

Prints one line per kernel, then every finding. Exit code 1 if there is one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from campaigns.lint.lint_all import report
from campaigns.lint.lint_case import Case, alarm_of, channel_kind, source_of_kinds, tensor_kind
from examples.tile_kernels.all_gather_experts import gather_experts_kernel
from examples.tile_kernels.gathered_attention import attention_kernel
from examples.tile_kernels.matmul_ring_reduce_scatter import matmul_ring_kernel
from overweave.lang.mapping import TileChannel, Tiles
from tools.ptx_lint.contract import Contract, Guard

WORLD_SIZES = (2, 4)


def cases() -> Iterator[Case]:
    """Each kernel for each world size, on rank 0 and on rank 1, whose number is a constant to a launch."""
    for ranks in WORLD_SIZES:
        for rank in ("i32", 1):
            yield ring_case(ranks, rank)
            yield experts_case(ranks, rank)
            yield attention_case(ranks, rank)


def ring_case(ranks: int, rank: Any) -> Case:
    """Two waits and two kinds of signals, its own and those of the ring."""
    made, moved = Tiles(4096, 2048, 128, 128, ranks), Tiles(4096, 2048, 64, 128, ranks)
    signature = {
        "partials": channel_kind(TileChannel(made, moved, channels=made.down), rank),
        "ring": channel_kind(TileChannel(moved, has_peers=True), rank),
        "arriving": tensor_kind(2048, False),
        **dict.fromkeys(("a", "b", "partial", "out"), "*bf16"),
        "K": "i32",
    }
    contract = Contract(
        waits=2,
        looks=2,
        releases=2,
        guarded=(
            Guard("partials.signals", ("partial",), optional=True),
            Guard("ring.signals", ("arriving.own",), optional=True),
        ),
        announced=(
            Guard("*partials.peers", ("partial",)),
            Guard("*ring.peers", ("*arriving.addresses",), optional=True),
        ),
        alarm=alarm_of("partials", "ring"),
        wgmma=True,
        depth=1,
    )
    constants = {"N": 2048, "BLOCK_K": 64, "RING": 20}
    return Case(source_of_kinds(matmul_ring_kernel, signature, constants, ranks, ("K",)), contract)


def experts_case(ranks: int, rank: Any) -> Case:
    """Two waits: for the shards of peers, and for the tokens that a table names."""
    made, ready = Tiles(4096, 2048, 64, 128, ranks), Tiles(ranks, 1, 1, 1, ranks)
    signature = {
        "ready": channel_kind(TileChannel(ready), rank),
        "gathered": channel_kind(TileChannel(made, Tiles(8192, 1536, 128, 128), channels=made.down), rank, "*i32"),
        "shards": tensor_kind(2048, True),
        "tokens": "*bf16",
        "order": "*i32",
        "experts": "*i32",
        "w": "*bf16",
        "out": "*bf16",
        **dict.fromkeys(("H", "D", "TOPK"), "i32"),
    }
    contract = Contract(
        waits=2,
        looks=2,
        releases=1,
        guarded=(
            Guard("ready.signals", ("*shards.addresses",), optional=True),
            Guard("gathered.signals", ("tokens",), optional=True),
        ),
        announced=(Guard("*gathered.peers", ("tokens",)),),
        alarm=alarm_of("ready", "gathered"),
        wgmma=True,
        depth=1,
    )
    constants = {"BLOCK_K": 64, "PULL": 20}
    return Case(source_of_kinds(gather_experts_kernel, signature, constants, ranks, ("H", "D")), contract)


def attention_case(ranks: int, rank: Any) -> Case:
    """One wait, for each shard of keys and values."""
    length, heads, dim = 4096 * ranks, 16, 128
    tiles = Tiles(length, heads * dim, 4096, heads * dim, ranks)
    signature = {
        "gathered": channel_kind(TileChannel(tiles), rank),
        **dict.fromkeys(("keys", "values"), tensor_kind(heads * dim, False)),
        "q": "*bf16",
        "out": "*bf16",
        "Q": "i32",
        "scale": "fp32",
    }
    contract = Contract(
        waits=1,
        unrolls=(ranks,),
        looks=1,
        guarded=(Guard("gathered.signals", ("keys.own", "values.own"), optional=True),),
        alarm=alarm_of("gathered"),
        wgmma=True,
    )
    constants = {"H": heads, "D": dim, "BLOCK_Q": 128, "BLOCK_S": 64}
    return Case(source_of_kinds(attention_kernel, signature, constants, ranks, ("Q",)), contract)


def main() -> int:
    return report(cases())


if __name__ == "__main__":
    sys.exit(main())
