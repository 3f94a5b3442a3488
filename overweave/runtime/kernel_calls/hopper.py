"""The call of the Hopper tile kernel, which a GPU alone runs. Loaded where a plan asks for it (runtime/backends.py)."""

from __future__ import annotations

from typing import Any

import torch
from msgspec.structs import replace
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

from overweave.ir.kernel_limits import MOST_PEERS
from overweave.ir.plan import MatmulConfig
from overweave.kernels.hopper.matmul import matmul_hopper_kernel
from overweave.runtime.kernel_calls.call import KernelCall, MatrixInput, TileKernelArgs, storage_layout
from overweave.runtime.kernel_calls.matmul import (
    Operands,
    a_descriptors,
    common_arguments,
    hopper_boxes,
    hopper_strip,
    pad_to_most_weights,
    traits_of,
)

GLUON_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float8_e4m3fn: gl.float8e4nv}


def hopper_call(config: MatmulConfig, operands: Operands, tiles: TileKernelArgs) -> KernelCall:
    """The Hopper kernel as `config` says."""
    return KernelCall(matmul_hopper_kernel, _arguments(config, operands, tiles), {"num_warps": 4}, tiles.queue.tiles)


def _arguments(config: MatmulConfig, operands: Operands, tiles: TileKernelArgs) -> list[Any]:
    (part_m, part_n), block_k = hopper_boxes(config), config.block_k
    block_b = [part_n, block_k] if operands.b_is_transposed else [block_k, part_n]
    sides = a_descriptors(operands, lambda matrix: _descriptor(matrix, [part_m, block_k]))
    factors = [_descriptor(matrix, block_b, operands.b_is_transposed) for matrix in operands.factors]
    first_k = None
    if operands.rest is not None:
        a_rest, b_rest = operands.rest
        sides, first_k = (sides[0], _descriptor(a_rest, [part_m, block_k])), operands.factors[0].shape[0]
        factors.append(_descriptor(b_rest, block_b, operands.b_is_transposed))
    outs = [_descriptor(matrix, [part_m, part_n]) for matrix in operands.outs]
    total_tiles, addends, addend_tiles = None, operands.addends, None
    if operands.total is not None:
        total_tiles = _descriptor(operands.total, [part_m, part_n])
    if operands.addend_rows is not None:
        matrix, addends = operands.addend_rows
        addend_tiles = _descriptor(matrix, [part_m, part_n])
    peers, at_peers, strip = operands.peers, list[Any](), [*hopper_strip(config)]
    for own in (operands.outs[0], peers.spread) if peers else (None, None):
        maps = [_descriptor(at_peer, strip) for at_peer in peers.at(own)] if peers and own is not None else []
        at_peers += maps + [None] * (MOST_PEERS - len(maps))
    arguments: list[Any] = [
        *sides,
        *pad_to_most_weights(factors),
        *pad_to_most_weights(outs),
        total_tiles,
        *at_peers,
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
