"""Launches of the two tile kernels behind one face, for a Plan or alone on one GPU."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

from overweave.ir.epilogue import BIAS, GATE, NO_EPILOGUE, RESIDUAL, SCALE_W, SCALE_X, Epilogue
from overweave.ir.plan import MatmulConfig
from overweave.ir.tile_order import TileRow, share_places
from overweave.ir.words import MOST_PEERS
from overweave.kernels.hopper.matmul import matmul_hopper_kernel
from overweave.kernels.matmul import matmul_kernel
from overweave.memory.cuda.shares import Shares, share_numbers
from overweave.memory.device.signals import TRACE_COLUMNS
from overweave.runtime.gpu.kernels.arguments import moving, table_tensor
from overweave.runtime.gpu.kernels.kernels import Launch
from overweave.runtime.gpu.kernels.matmul_call import (
    Operands,
    Protocol,
    a_sides,
    constants,
    filled,
    portable_arguments,
    subjects,
)

GLUON_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float8_e4m3fn: gl.float8e4nv}


def matmul_launch(config: MatmulConfig, operands: Operands, protocol: Protocol) -> Launch:
    """The tile kernel that `config` names, ready to run over a table."""
    kernel, arguments, options = matmul_call(config, operands, protocol)
    return Launch(kernel, protocol.programs(), arguments, options)


def matmul_call(config: MatmulConfig, operands: Operands, protocol: Protocol) -> tuple[Any, list[Any], dict[str, int]]:
    """The kernel that `config` names, all its arguments, and how it is compiled."""
    if config.kernel == "hopper":
        return matmul_hopper_kernel, hopper_arguments(config, operands, protocol), {"num_warps": 4}
    options = {"num_warps": config.warps, "num_stages": config.stages}
    return matmul_kernel, portable_arguments(config, operands, protocol), options


def hopper_arguments(config: MatmulConfig, operands: Operands, protocol: Protocol) -> list[Any]:
    """All arguments of `matmul_hopper_kernel`."""
    (part_m, part_n), block_k = hopper_parts(config), config.block_k
    sides = a_sides(operands, lambda matrix, base: _described(matrix, base, [part_m, block_k]))
    block_b = [part_n, block_k] if operands.b_is_transposed else [block_k, part_n]
    factors = [_described(matrix, base, block_b) for matrix, base in operands.factors]
    outs = [_described(matrix, base, [part_m, part_n]) for matrix, base in operands.outs]
    total_tiles, addends, addend_tiles = None, operands.addends, None
    if operands.total is not None:
        total_tiles = _described(operands.total, operands.base("total"), [part_m, part_n])
    if operands.addend_rows is not None:
        matrix, addends = operands.addend_rows
        addend_tiles = _described(matrix, moving(matrix), [part_m, part_n])
    peers, at_peers, strip = operands.peers, list[Any](), [*hopper_strip(config)]
    for own in (operands.out, peers.spread) if peers else (None, None):
        maps = [_described(own, base, strip) for base in peers.at(own)] if peers and own is not None else []
        at_peers += maps + [None] * (MOST_PEERS - len(maps))
    arguments: list[Any] = [*sides, *filled(factors), *filled(outs), total_tiles, *at_peers, addend_tiles]
    arguments += subjects(operands, addends, protocol)
    arguments += [operands.b_is_transposed, operands.has_two_sources, protocol.traced, config.stages]
    arguments += [config.split_n, config.block_m < 128, *constants(operands, protocol)]
    return [*arguments, len(peers.distances) if peers else 0]


def _described(matrix: torch.Tensor, base: Any, block: list[int]) -> GluonDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(block, GLUON_DTYPES[matrix.dtype])
    described = GluonDescriptor(matrix, list(matrix.shape), list(matrix.stride()), block, layout)
    described.base = base
    return described


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


class Matmul:
    """`out = a @ b` by a tile kernel alone on one GPU, over a table without waits (campaigns/rates/gpu_rates.py)."""

    def __init__(
        self,
        config: MatmulConfig,
        rows: tuple[TileRow, ...],
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        epilogue: Epilogue = NO_EPILOGUE,
        extras: Mapping[str, torch.Tensor] = MappingProxyType({}),
        traced: bool = False,
    ) -> None:
        """extras: what the epilogue reads, by name. traced: each run fills `trace`, int64 `[rows, TRACE_COLUMNS]`."""
        device, is_transposed = a.device, b.stride(0) == 1 and b.stride(1) != 1
        read: dict[str, Any] = {name: extras.get(name) for name in (BIAS, RESIDUAL, GATE, SCALE_X, "scales", SCALE_W)}
        operands = Operands(a, None, b, out, is_transposed, {}, **read, epilogue=epilogue)
        words = torch.zeros(64, dtype=torch.int32, device=device)
        limits = torch.tensor([10**9, 0, 0], dtype=torch.int64, device=device)
        trace_size = (len(rows) if traced else 1, TRACE_COLUMNS.value)
        self.trace = torch.zeros(trace_size, dtype=torch.int64, device=device)
        table = table_tensor(rows, device)
        self._claims = torch.zeros(1, dtype=torch.int32, device=device)
        places, self.out = share_places(rows), out
        self.shares = Shares.allocate(places, share_numbers(config, epilogue), device) if places else None
        protocol = Protocol(table, self._claims, words, words, limits, self.trace, 1, traced, shares=self.shares)
        self.launch = matmul_launch(config, operands, protocol)

    def __call__(self) -> None:
        """Runs on the current stream, with the tensors it was made for."""
        self.rewind()
        self.run()

    def rewind(self) -> None:
        """All tiles are there to be claimed again."""
        self._claims.zero_()

    def run(self) -> None:
        """The tiles that nobody has claimed yet."""
        self.launch(torch.cuda.current_stream().cuda_stream)
