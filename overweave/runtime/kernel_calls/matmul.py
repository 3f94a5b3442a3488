"""The calls of the matmul tile kernels, and their operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec.structs import replace

from overweave.ir.epilogue import NO_EPILOGUE, Epilogue
from overweave.ir.plan import MOST_WEIGHTS, MatmulConfig
from overweave.kernels.arguments import EpilogueArgs, ExpertRows, MatmulOutputs, PeerStores, Traits
from overweave.kernels.epilogue import epilogue_code, gate_weights, operands_of
from overweave.kernels.matmul import matmul_kernel
from overweave.kernels.tile_end import EXPERTS
from overweave.runtime.backends import load
from overweave.runtime.kernel_calls.call import KernelCall, MatrixInput, Peers, TileKernelArgs, descriptor

# fp32 means fp32: no TF32. For 16-bit operands the name decides nothing.
PRECISION = {torch.float32: "ieee", torch.float8_e4m3fn: "fp8"}


@dataclass(frozen=True)
class Operands:
    """Operands, outputs and epilogue operands of a matmul tile kernel.

    a_shard, a_workspace: `[rows, k]`, either may be None. weights: (B matrix `[k, n]`, output `[rows, n]`), all in
    the same memory layout; `TileRow.weight` is the index.
    epilogue_inputs: by name. Scales of rows, or None: scale_x of those of a_shard, scale_gathered of a_workspace's.
    second_k_part: further columns of a_shard, and rows of the one B matrix, that extend k; Hopper kernel only.
    total: `[rows, n]`, a second output, chosen by `TileRow.into`; None if there is none.
    addends: int64 `[operations, addends]`, their addresses (memory/lower.addend_addresses); None if no tile has any.
    addend_rows: if every operation has one addend in one own matrix: that matrix `[rows, n]`, and int64 `[operations]`,
    the addend's row minus the result's (memory/lower.addend_row_shifts).
    peers: where tiles store their products at other ranks; None if they do not.
    experts: set if tiles name experts: then B matrices, and the gate, are stacks `[experts, k, n]`.
    """

    a_shard: MatrixInput | None
    a_workspace: MatrixInput | None
    weights: tuple[tuple[MatrixInput, MatrixInput], ...]
    b_is_transposed: bool
    epilogue_inputs: Mapping[str, MatrixInput] = field(default_factory=dict)
    scale_x: MatrixInput | None = None
    scale_gathered: MatrixInput | None = None
    epilogue: Epilogue = NO_EPILOGUE
    total: MatrixInput | None = None
    addends: torch.Tensor | None = None
    addend_rows: tuple[MatrixInput, torch.Tensor] | None = None
    second_k_part: tuple[MatrixInput, MatrixInput] | None = None
    peers: Peers | None = None
    experts: ExpertRows | None = None

    @property
    def weight_matrices(self) -> list[MatrixInput]:
        """All weights, then that of the epilogue, of the first one's shape and layout, if it reads a product."""
        return [*(b for b, _ in self.weights), *gate_weights(self.epilogue, self.epilogue_inputs)]

    @property
    def k(self) -> int:
        """Columns of a, with those of `second_k_part`."""
        return self.weight_matrices[0].shape[-2] + (0 if self.second_k_part is None else self.second_k_part[1].shape[0])

    @property
    def outs(self) -> list[MatrixInput]:
        """The outputs, one for each weight."""
        return [out for _, out in self.weights]

    @property
    def output_args(self) -> MatmulOutputs:
        """The kernel's outputs and their widths."""
        outs, widths = pad_weights(self.outs), pad_weights([out.shape[1] for out in self.outs])
        return MatmulOutputs(*outs, *widths, self.total)  # type: ignore[call-arg]  # lists of MOST_WEIGHTS

    @property
    def epilogue_args(self) -> EpilogueArgs:
        """The epilogue's operands; a missing tensor of row scales is replaced by the other, and not read."""
        own, second_k_part = self.scale_x, self.scale_gathered
        scales = (second_k_part if own is None else own, own if second_k_part is None else second_k_part)
        return EpilogueArgs(operands_of(self.epilogue, self.epilogue_inputs), *scales)

    @property
    def peer_args(self) -> PeerStores:
        """The kernel's argument for stores at other ranks."""
        return PeerStores(self.peers.table, self.peers.spread_ranks) if self.peers else PeerStores()


def pad_weights(operands: list[Any]) -> list[Any]:
    """Pad a list of one item for each weight by None, to the kernel's number of weights."""
    return operands + [None] * (MOST_WEIGHTS - len(operands))


def a_descriptors(operands: Operands, describe: Callable[[MatrixInput], Any]) -> tuple[Any, Any]:
    """Return descriptors of a_shard and a_workspace; a missing one is replaced by the other, and not read."""
    sides = [None if one is None else describe(one) for one in (operands.a_shard, operands.a_workspace)]
    return sides[0] or sides[1], sides[1] or sides[0]


def matmul_call(config: MatmulConfig, operands: Operands, tiles: TileKernelArgs) -> KernelCall:
    """Return the call of the tile kernel that `config` names. Raises KernelUnavailable if it cannot be imported."""
    if config.kernel != "hopper":
        return portable_call(config, operands, tiles)
    return load("hopper kernel")(config, operands, tiles)  # type: ignore[no-any-return]


def portable_call(config: MatmulConfig, operands: Operands, tiles: TileKernelArgs) -> KernelCall:
    """Return the call of `matmul_kernel`, which the interpreter runs, too."""
    block_a, is_transposed = [config.block_m, config.block_k], operands.b_is_transposed
    block_b = [config.block_n, config.block_k] if is_transposed else [config.block_k, config.block_n]
    block_b = block_b if operands.experts is None else [1, *block_b]
    a_sides = a_descriptors(operands, lambda matrix: descriptor(matrix, block_a))
    weights = [descriptor(matrix, block_b, is_transposed) for matrix in operands.weight_matrices]
    traits = replace(traits_of(operands, tiles), precision=PRECISION.get(operands.weight_matrices[0].dtype, "tf32"))
    arguments: list[Any] = [
        *a_sides,
        *pad_weights(weights),
        *common_arguments(operands, operands.addends, tiles),
        traits,
    ]
    options = {"num_warps": config.warps, "num_stages": config.stages}
    return KernelCall(matmul_kernel, arguments, options, tiles.queue.tiles)


def common_arguments(operands: Operands, addends: torch.Tensor | None, tiles: TileKernelArgs) -> list[Any]:
    """Return the arguments that both kernels take between their descriptors and their constants."""
    operand_args = [operands.output_args, operands.epilogue_args, addends, operands.peer_args, operands.experts]
    return [*operand_args, tiles.queue, tiles.protocol, operands.k]


def traits_of(operands: Operands, tiles: TileKernelArgs) -> Traits:
    """Return the compile-time traits of both kernels."""
    return Traits(
        b_is_transposed=operands.b_is_transposed,
        two_sources=operands.a_shard is not None and operands.a_workspace is not None,
        traced=tiles.traced,
        epilogue=epilogue_code(operands.epilogue),
        is_gated=operands.epilogue.products > 1,
        addends=0 if operands.addends is None else operands.addends.shape[1],
        weights=len(operands.weights) if operands.experts is None else EXPERTS.value,
        gathers=operands.experts is not None and operands.experts.row_index is not None,
    )


def hopper_boxes(config: MatmulConfig) -> tuple[int, int]:
    """Return the TMA box (rows, columns) of the Hopper kernel: rows of A, columns of B, both of outputs and addends.

    Two consumer warpgroups divide a tile's rows, and it has `split_n` boxes of columns side by side: a narrow tile of
    the last wave takes fewer. Of a tile of 64 rows they divide the columns.
    """
    if config.block_m < 128:
        return config.block_m, config.block_n // 2
    return config.block_m // 2, config.block_n // config.split_n


def hopper_strip(config: MatmulConfig) -> tuple[int, int]:
    """Return the TMA box (rows, columns) of one store at a peer: 64 16-bit columns fill a swizzled row of 128 bytes."""
    return 16, min(hopper_boxes(config)[1], 64)
