"""Launches of the two tile kernels behind one face, for a Plan or alone on one GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

from overweave.ir.plan import MatmulConfig, TileRow
from overweave.kernels.matmul import matmul_kernel
from overweave.kernels.matmul_hopper import matmul_hopper_kernel
from overweave.memory.device import TRACE_COLUMNS
from overweave.runtime.kernels import Launch, Moving, descriptor, moving, table_tensor

# fp32 means fp32: no TF32. For 16-bit operands the name decides nothing.
PRECISION = {torch.float32: "ieee"}
GLUON_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@dataclass(frozen=True)
class Operands:
    """What a tile kernel multiplies. Example tensors: `bases` says which of them move.

    a_shard, a_workspace: `[rows, k]`, either may be None. b: `[k, n]`, in either memory layout. out: `[rows, n]`.
    """

    a_shard: torch.Tensor | None
    a_workspace: torch.Tensor | None
    b: torch.Tensor
    out: torch.Tensor
    b_is_transposed: bool
    bases: dict[str, Moving]

    def base(self, name: str) -> Moving:
        """The stand-in of an operand, fixed if it does not move."""
        tensor = getattr(self, name)
        return self.bases.get(name) or moving(tensor)

    @property
    def stored_b(self) -> torch.Tensor:
        """`b` as it lies in memory, row-major."""
        return self.b.t() if self.b_is_transposed else self.b


@dataclass(frozen=True)
class Protocol:
    """The arrays every tile kernel takes: its table, and the words of the workspace (memory/protocol.py)."""

    table: torch.Tensor
    claims: torch.Tensor
    signals: torch.Tensor
    words: torch.Tensor
    limits: torch.Tensor
    trace: torch.Tensor
    world_size: int
    traced: bool = False

    @property
    def arrays(self) -> list[torch.Tensor]:
        return [self.table, self.claims, self.signals, self.words, self.limits, self.trace]


def matmul_launch(config: MatmulConfig, operands: Operands, protocol: Protocol) -> Launch:
    """The tile kernel that `config` names, ready to run over a table."""
    make = {"portable": _portable, "hopper": _hopper}[config.kernel]
    return make(config, operands, protocol)


def programs_for(tiles: int, device: torch.device) -> int:
    """One persistent program per SM, or fewer if there are fewer tiles."""
    return max(1, min(torch.cuda.get_device_properties(device).multi_processor_count, tiles))


def _portable(config: MatmulConfig, operands: Operands, protocol: Protocol) -> Launch:
    block_a = [config.block_m, config.block_k]
    block_b = [config.block_n, config.block_k] if operands.b_is_transposed else [config.block_k, config.block_n]
    shard, workspace = _a_sides(operands, lambda matrix, base: descriptor(matrix, block_a, base))
    b = descriptor(operands.stored_b, block_b, operands.base("b"))
    tiles, (k, n) = protocol.table.shape[0], operands.b.shape
    arguments: list[Any] = [shard, workspace, b, operands.base("out"), *protocol.arrays, tiles, n, k]
    arguments += [protocol.world_size, PRECISION.get(operands.b.dtype, "tf32"), operands.b_is_transposed]
    arguments += [_has_two_sources(operands), protocol.traced]
    options = {"num_warps": config.warps, "num_stages": config.stages}
    return Launch(matmul_kernel, programs_for(tiles, operands.b.device), arguments, options)


def _hopper(config: MatmulConfig, operands: Operands, protocol: Protocol) -> Launch:
    dtype = GLUON_DTYPES[operands.b.dtype]

    def describe(matrix: torch.Tensor, base: Moving, block: list[int]) -> GluonDescriptor:
        layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
        described = GluonDescriptor(matrix, list(matrix.shape), list(matrix.stride()), block, layout)
        described.base = base
        return described

    half_m, block_n, block_k = config.block_m // 2, config.block_n, config.block_k
    shard, workspace = _a_sides(operands, lambda matrix, base: describe(matrix, base, [half_m, block_k]))
    b = describe(
        operands.stored_b, operands.base("b"), [block_n, block_k] if operands.b_is_transposed else [block_k, block_n]
    )
    out_base = operands.base("out")
    out = describe(operands.out, out_base, [half_m, block_n])
    tiles, (k, n) = protocol.table.shape[0], operands.b.shape
    arguments: list[Any] = [shard, workspace, b, out, out_base, *protocol.arrays, tiles, n, k, protocol.world_size]
    arguments += [operands.b_is_transposed, _has_two_sources(operands), protocol.traced, config.stages]
    return Launch(matmul_hopper_kernel, programs_for(tiles, operands.b.device), arguments, {"num_warps": 4})


def _a_sides(operands: Operands, describe: Any) -> tuple[Any, Any]:
    """Descriptors of both places of `a`; a side that is not read stands for the other."""
    sides = [
        None if matrix is None else describe(matrix, operands.base(name))
        for name, matrix in (("a_shard", operands.a_shard), ("a_workspace", operands.a_workspace))
    ]
    return sides[0] or sides[1], sides[1] or sides[0]


def _has_two_sources(operands: Operands) -> bool:
    return operands.a_shard is not None and operands.a_workspace is not None


class Matmul:
    """`out = a @ b` by a tile kernel alone on one GPU, over a table without waits (campaigns/gpu_rates.py)."""

    def __init__(
        self, config: MatmulConfig, rows: tuple[TileRow, ...], a: torch.Tensor, b: torch.Tensor, out: torch.Tensor
    ) -> None:
        device, is_transposed = a.device, b.stride(0) == 1 and b.stride(1) != 1
        operands = Operands(a, None, b, out, is_transposed, {})
        words = torch.zeros(64, dtype=torch.int32, device=device)
        limits = torch.tensor([10**9, 0, 0], dtype=torch.int64, device=device)
        trace = torch.zeros(TRACE_COLUMNS.value, dtype=torch.int64, device=device)
        table = table_tensor(rows, device)
        self._claims = torch.zeros(1, dtype=torch.int32, device=device)
        protocol = Protocol(table, self._claims, words, words, limits, trace, world_size=1)
        self.launch = matmul_launch(config, operands, protocol)

    def __call__(self) -> None:
        """Runs on the current stream, with the tensors it was made for."""
        self._claims.zero_()
        self.launch(torch.cuda.current_stream().cuda_stream)
