"""The call of the Hopper tile kernel, imported at its first use (runtime/backends.py): it needs a GPU."""

from __future__ import annotations

from typing import Any

import torch
from msgspec.structs import replace
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

from overweave.ir.plan import MOST_PEERS, MatmulConfig
from overweave.kernels.hopper.matmul import matmul_hopper_kernel
from overweave.runtime.kernel_calls.call import KernelCall, MatrixInput, TileKernelArgs, flattened, storage_layout
from overweave.runtime.kernel_calls.matmul import (
    Operands,
    a_descriptors,
    common_arguments,
    hopper_boxes,
    hopper_strip,
    pad_weights,
    traits_of,
)

GLUON_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float8_e4m3fn: gl.float8e4nv}


def hopper_call(config: MatmulConfig, operands: Operands, tiles: TileKernelArgs) -> KernelCall:
    """Return the call of the Hopper kernel with a configuration."""
    return KernelCall(matmul_hopper_kernel, _arguments(config, operands, tiles), {"num_warps": 4}, tiles.queue.tiles)


def _arguments(config: MatmulConfig, operands: Operands, tiles: TileKernelArgs) -> list[Any]:
    """Return the kernel's arguments: descriptors, then those that both kernels take, then traits."""
    (box_m, box_n), block_k = hopper_boxes(config), config.block_k
    block_b = [box_n, block_k] if operands.b_is_transposed else [block_k, box_n]
    a_sides = a_descriptors(operands, lambda matrix: _descriptor(matrix, [box_m, block_k]))
    factors = operands.weight_matrices
    if operands.experts is not None:
        factors = [flattened(stack, operands.b_is_transposed) for stack in factors]
    weights = [_descriptor(matrix, block_b, operands.b_is_transposed) for matrix in factors]
    first_k = None
    if operands.second_k_part is not None:
        a_second, b_second = operands.second_k_part
        a_sides, first_k = (a_sides[0], _descriptor(a_second, [box_m, block_k])), operands.weight_matrices[0].shape[0]
        weights.append(_descriptor(b_second, block_b, operands.b_is_transposed))
    outs = [_descriptor(matrix, [box_m, box_n]) for matrix in operands.outs]
    total_tiles, addends, addend_tiles = None, operands.addends, None
    if operands.total is not None:
        total_tiles = _descriptor(operands.total, [box_m, box_n])
    if operands.addend_rows is not None:
        matrix, addends = operands.addend_rows
        addend_tiles = _descriptor(matrix, [box_m, box_n])
    peers, peer_stores, strip = operands.peers, list[Any](), [*hopper_strip(config)]
    for own in (operands.outs[0], peers.spread) if peers else (None, None):
        maps = [_descriptor(remote, strip) for remote in peers.at_peers(own)] if peers and own is not None else []
        peer_stores += maps + [None] * (MOST_PEERS - len(maps))
    arguments: list[Any] = [
        *a_sides,
        *pad_weights(weights),
        *pad_weights(outs),
        total_tiles,
        *peer_stores,
        addend_tiles,
    ]
    traits = replace(
        traits_of(operands, tiles),
        stages=config.stages,
        split_n=config.split_n,
        in_columns=config.block_m < 128,
        peers=len(peers.distances) if peers else 0,
    )
    return [*arguments, *common_arguments(operands, addends, tiles), first_k, traits]


def _descriptor(matrix: MatrixInput, block: list[int], is_transposed: bool = False) -> GluonDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(block, GLUON_DTYPES[matrix.dtype])
    return GluonDescriptor(matrix, *storage_layout(matrix, is_transposed), block, layout)
