"""What the tile kernels of a matmul are given, and their calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from msgspec.structs import replace

from overweave.ir.epilogue import NO_EPILOGUE, Epilogue
from overweave.ir.plan import MOST_WEIGHTS, MatmulConfig
from overweave.kernels.added import code_of
from overweave.kernels.arguments import AtPeers, Ends, MatmulOutputs, Traits
from overweave.kernels.matmul import matmul_kernel
from overweave.memory.shares import Shares
from overweave.runtime.backends import load
from overweave.runtime.kernel_calls.call import KernelCall, MatrixInput, Peers, TileKernelArgs, descriptor

# fp32 means fp32: no TF32. For 16-bit operands the name decides nothing.
PRECISION = {torch.float32: "ieee", torch.float8_e4m3fn: "fp8"}


@dataclass(frozen=True)
class Operands:
    """What a tile kernel multiplies, and what its tiles end with.

    a_shard, a_workspace: `[rows, k]`, either may be None. weights: each `[k, n]`, in either memory layout, all in one,
    with its output `[rows, n]`; `TileRow.weight` numbers them.
    bias `[n]`, residual `[rows, n]`, scale_x and scale_w: what the epilogue reads, else None. scale_x lies beside the
    rows of a_shard, and scale_gathered beside those of a_workspace; or scale_x, one element, is that of all. gate: a
    weight of the first one's shape and layout.
    rest: further columns of a_shard, and as many rows of the one weight, that lie elsewhere; the Hopper kernel's alone.
    total: `[rows, n]`, a second output, of which `TileRow.into` tells; None if there is none.
    addends: int64 `[operations, addends]`, where those of each tile lie (memory/lower.addend_addresses); None if no
    tile has any. addend_rows: if all lie in one own matrix `[rows, n]` and no tile has two, that, and int64
    `[operations]`, how many rows further than the result (memory/lower.addend_shifts).
    shares: memory for tiles that are dealt out along k; None if none is.
    peers: where tiles store at other ranks, products in the first output (`Peers`); None if none does.
    more: what registered epilogues read.
    """

    a_shard: MatrixInput | None
    a_workspace: MatrixInput | None
    weights: tuple[tuple[MatrixInput, MatrixInput], ...]
    b_is_transposed: bool
    bias: MatrixInput | None = None
    residual: MatrixInput | None = None
    scale_x: MatrixInput | None = None
    scale_gathered: MatrixInput | None = None
    scale_w: MatrixInput | None = None
    epilogue: Epilogue = NO_EPILOGUE
    total: MatrixInput | None = None
    addends: torch.Tensor | None = None
    addend_rows: tuple[MatrixInput, torch.Tensor] | None = None
    gate: MatrixInput | None = None
    rest: tuple[MatrixInput, MatrixInput] | None = None
    shares: Shares | None = None
    peers: Peers | None = None
    more: tuple[Any, ...] | None = None

    @property
    def factors(self) -> list[MatrixInput]:
        """Every weight; behind them the gate."""
        return [*(b for b, _ in self.weights), *([] if self.gate is None else [self.gate])]

    @property
    def k(self) -> int:
        """Columns of a, in all."""
        return self.factors[0].shape[0] + (0 if self.rest is None else self.rest[1].shape[0])

    @property
    def outs(self) -> list[MatrixInput]:
        """The output of every weight."""
        return [out for _, out in self.weights]

    @property
    def products(self) -> MatmulOutputs:
        """What the kernel writes."""
        outs, widths = filled(self.outs), filled([out.shape[1] for out in self.outs])
        return MatmulOutputs(*outs, *widths, self.total)  # type: ignore[call-arg]  # lists of MOST_WEIGHTS

    @property
    def ends(self) -> Ends:
        """What the epilogue reads; scales that are not read stand for the others."""
        own, rest = self.scale_x, self.scale_gathered
        scales = (rest if own is None else own, own if rest is None else rest)
        return Ends(self.bias, self.residual, *scales, self.scale_w, self.more)

    @property
    def at_peers(self) -> AtPeers:
        """Where tiles store at other ranks, as the kernel takes it."""
        return AtPeers(self.peers.places, self.peers.everyone) if self.peers else AtPeers()


def filled(operands: list[Any]) -> list[Any]:
    """Those of every weight that a kernel has a place for; None where there is none."""
    return operands + [None] * (MOST_WEIGHTS - len(operands))


def a_sides(operands: Operands, describe: Callable[[MatrixInput], Any]) -> tuple[Any, Any]:
    """Descriptors of both places of `a`; a side that is not read stands for the other."""
    sides = [None if one is None else describe(one) for one in (operands.a_shard, operands.a_workspace)]
    return sides[0] or sides[1], sides[1] or sides[0]


def matmul_call(config: MatmulConfig, operands: Operands, tiles: TileKernelArgs) -> KernelCall:
    """The call of the tile kernel that `config` names. Raises KernelUnavailable where that cannot be loaded."""
    if config.kernel != "hopper":
        return portable_call(config, operands, tiles)
    return load("hopper kernel")(config, operands, tiles)  # type: ignore[no-any-return]


def portable_call(config: MatmulConfig, operands: Operands, tiles: TileKernelArgs) -> KernelCall:
    """The call of `matmul_kernel`, which the interpreter runs, too."""
    block_a, is_transposed = [config.block_m, config.block_k], operands.b_is_transposed
    block_b = [config.block_n, config.block_k] if is_transposed else [config.block_k, config.block_n]
    sides = a_sides(operands, lambda matrix: descriptor(matrix, block_a))
    factors = [descriptor(matrix, block_b, is_transposed) for matrix in operands.factors]
    traits = replace(traits_of(operands, tiles), precision=PRECISION.get(operands.factors[0].dtype, "tf32"))
    arguments: list[Any] = [*sides, *filled(factors), *subjects(operands, operands.addends, tiles), traits]
    options = {"num_warps": config.warps, "num_stages": config.stages}
    return KernelCall(matmul_kernel, arguments, options, tiles.queue.tiles)


def subjects(operands: Operands, addends: torch.Tensor | None, tiles: TileKernelArgs) -> list[Any]:
    """What both kernels take between their tensor descriptors and their constants."""
    own = [operands.products, operands.ends, addends, operands.at_peers, operands.shares]
    return [*own, tiles.queue, tiles.protocol, operands.k]


def traits_of(operands: Operands, tiles: TileKernelArgs) -> Traits:
    """What both kernels are compiled for."""
    return Traits(
        b_is_transposed=operands.b_is_transposed,
        two_sources=operands.a_shard is not None and operands.a_workspace is not None,
        traced=tiles.traced,
        epilogue=code_of(operands.epilogue),
        addends=0 if operands.addends is None else operands.addends.shape[1],
        weights=len(operands.weights),
        split_k=operands.shares is not None,
    )


def hopper_parts(config: MatmulConfig) -> tuple[int, int]:
    """Rows and columns of the rectangles in which the Hopper kernel moves a tile.

    Two consumers share its rows, or, of a tile of 64 rows, its columns. Half tiles take one rectangle of columns.
    """
    if config.block_m < 128:
        return config.block_m, config.block_n // 2
    return config.block_m // 2, config.block_n // config.split_n


def hopper_strip(config: MatmulConfig) -> tuple[int, int]:
    """Rows and columns of what the Hopper kernel stores at a peer at once: no more columns than 16-bit numbers fill a
    row of swizzled shared memory.
    """
    return 16, min(hopper_parts(config)[1], 64)
