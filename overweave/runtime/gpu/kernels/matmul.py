"""Launches of the two tile kernels behind one face, for a Plan or alone on one GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

from overweave.ir.epilogue import BIAS, GATE, NO_EPILOGUE, RESIDUAL, SCALE_W, SCALE_X, Epilogue
from overweave.ir.plan import MOST_WEIGHTS, MatmulConfig, numbered
from overweave.ir.tile_order import TileRow, share_places
from overweave.ir.words import MOST_PEERS
from overweave.kernels.hopper.matmul import matmul_hopper_kernel
from overweave.kernels.matmul import matmul_kernel
from overweave.memory.cuda.heap import sms_for_copies
from overweave.memory.cuda.shares import Shares, share_numbers
from overweave.memory.device.signals import TRACE_COLUMNS
from overweave.runtime.gpu.kernels.kernels import Launch, Moving, descriptor, moving, table_tensor
from overweave.runtime.gpu.kernels.peers import Peers

# fp32 means fp32: no TF32. For 16-bit operands the name decides nothing.
PRECISION = {torch.float32: "ieee", torch.float8_e4m3fn: "fp8"}
GLUON_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float8_e4m3fn: gl.float8e4nv}


@dataclass(frozen=True)
class Operands:
    """What a tile kernel multiplies. Example tensors: `bases` says which of them move.

    a_shard, a_workspace: `[rows, k]`, either may be None. b: `[k, n]`, in either memory layout. out: `[rows, n]`.
    more: further weights of `b`'s layout and their outs, by which `TileRow.weight` numbers them; `bases` calls them
    `b.1` and `out.1`, and so on.
    bias `[n]`, residual `[rows, n]`, scale_x and scale_w: what the epilogue reads, else None. scale_x lies beside the
    rows of a_shard, and scales beside those of a_workspace; or scale_x, one element, is that of all. gate: a weight of
    `b`'s shape and layout; `bases` calls it `b.1`.
    total: `[rows, n]`, a second output, of which `TileRow.into` tells; None if there is none.
    addends: int64 `[operations, addends]`, where those of each tile lie (memory/lower.addend_addresses); None if no
    tile has any. addend_rows: if all lie in one own matrix `[rows, n]` and no tile has two, that, and int64
    `[operations]`, how many rows further than the result (memory/lower.addend_shifts).
    peers: where tiles store at other ranks, products in `out` (runtime/gpu/kernels/peers.py); None if none does.
    """

    a_shard: torch.Tensor | None
    a_workspace: torch.Tensor | None
    b: torch.Tensor
    out: torch.Tensor
    b_is_transposed: bool
    bases: dict[str, Moving]
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    scale_x: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    scale_w: torch.Tensor | None = None
    epilogue: Epilogue = NO_EPILOGUE
    total: torch.Tensor | None = None
    addends: torch.Tensor | None = None
    addend_rows: tuple[torch.Tensor, torch.Tensor] | None = None
    more: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
    gate: torch.Tensor | None = None
    peers: Peers | None = None

    def base(self, name: str) -> Moving:
        """The stand-in of an operand, fixed if it does not move."""
        return self.bases.get(name) or moving(getattr(self, name))

    @property
    def factors(self) -> list[tuple[torch.Tensor, Moving]]:
        """Every weight as it lies in memory, row-major, with its stand-in; behind them the gate."""
        weights = [self.b, *(b for b, _ in self.more), *([] if self.gate is None else [self.gate])]
        return self._numbered("b", [self.stored(b) for b in weights])

    @property
    def outs(self) -> list[tuple[torch.Tensor, Moving]]:
        """The output of every weight, with its stand-in."""
        return self._numbered("out", [self.out, *(out for _, out in self.more)])

    @property
    def widths(self) -> list[int | None]:
        """The columns of every weight that a kernel has a place for."""
        return filled([out.shape[1] for out, _ in self.outs])

    def stored(self, b: torch.Tensor) -> torch.Tensor:
        """A weight as it lies in memory, row-major."""
        return b.t() if self.b_is_transposed else b

    def _numbered(self, name: str, tensors: list[torch.Tensor]) -> list[tuple[torch.Tensor, Moving]]:
        bases = [self.bases.get(numbered(name, index)) for index in range(len(tensors))]
        return [(tensor, base or moving(tensor)) for tensor, base in zip(tensors, bases, strict=True)]

    @property
    def extras(self) -> list[Moving | None]:
        """What the epilogue reads, as the kernels take it; scales that are not read stand for the others."""
        bias, residual, own, rest, columns = (
            None if getattr(self, name) is None else self.base(name)
            for name in ("bias", "residual", "scale_x", "scales", "scale_w")
        )
        return [bias, residual, own or rest, rest or own, columns]

    @property
    def places_of_peers(self) -> list[Any]:
        """As the kernels take them, and how many ranks there are, if sums go to all."""
        return [self.peers.places, self.peers.everyone] if self.peers else [None, None]

    @property
    def addend_count(self) -> int:
        """How many addends a tile with addends has; 0 if none has any."""
        return 0 if self.addends is None else self.addends.shape[1]


@dataclass(frozen=True)
class Protocol:
    """The arrays every tile kernel takes: its table, and the words of the workspace (memory/device/protocol.py)."""

    table: torch.Tensor
    claims: torch.Tensor
    signals: torch.Tensor
    words: torch.Tensor
    limits: torch.Tensor
    trace: torch.Tensor
    world_size: int
    traced: bool = False
    sms_beside: int = 0  # that the kernel leaves to another one
    shares: Shares | None = None  # if tiles have any

    def programs(self) -> int:
        """One persistent program per SM that is left, or fewer if there are fewer tiles."""
        return programs_for(self.table.shape[0], self.table.device, self.sms_beside)

    @property
    def arrays(self) -> list[torch.Tensor]:
        return [self.table, self.claims, self.signals, self.words, self.limits, self.trace]

    @property
    def split_k(self) -> list[Any]:
        """The memory of shares, as the kernels take it."""
        return list(self.shares or (None, None))


def matmul_launch(config: MatmulConfig, operands: Operands, protocol: Protocol) -> Launch:
    """The tile kernel that `config` names, ready to run over a table."""
    make = {"portable": _portable, "hopper": _hopper}[config.kernel]
    return make(config, operands, protocol)


def filled(operands: list[Any]) -> list[Any]:
    """Those of every weight that a kernel has a place for; None where there is none."""
    return operands + [None] * (MOST_WEIGHTS - len(operands))


def programs_for(tiles: int, device: torch.device, sms_beside: int = 0) -> int:
    """One persistent program per SM, less those left to another kernel, or fewer if there are fewer tiles."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count - sms_beside - sms_for_copies()
    return max(1, min(sms, tiles))


def _portable(config: MatmulConfig, operands: Operands, protocol: Protocol) -> Launch:
    block_a = [config.block_m, config.block_k]
    block_b = [config.block_n, config.block_k] if operands.b_is_transposed else [config.block_k, config.block_n]
    shard, workspace = _a_sides(operands, lambda matrix, base: descriptor(matrix, block_a, base))
    factors = [descriptor(matrix, block_b, base) for matrix, base in operands.factors]
    tiles, k = protocol.table.shape[0], operands.b.shape[0]
    total = None if operands.total is None else operands.base("total")
    arguments: list[Any] = [shard, workspace, *filled(factors), *filled([base for _, base in operands.outs])]
    arguments += [*operands.extras, total, operands.addends, *operands.places_of_peers]
    arguments += [*protocol.split_k, *protocol.arrays, tiles, *operands.widths, k, protocol.world_size]
    arguments += [PRECISION.get(operands.b.dtype, "tf32"), operands.b_is_transposed]
    arguments += [_has_two_sources(operands), protocol.traced, operands.epilogue.bits, operands.addend_count]
    arguments += [len(operands.outs), protocol.shares is not None]
    options = {"num_warps": config.warps, "num_stages": config.stages}
    return Launch(matmul_kernel, protocol.programs(), arguments, options)


def _hopper(config: MatmulConfig, operands: Operands, protocol: Protocol) -> Launch:
    def describe(matrix: torch.Tensor, base: Moving, block: list[int]) -> GluonDescriptor:
        layout = gl.NVMMASharedLayout.get_default_for(block, GLUON_DTYPES[matrix.dtype])
        described = GluonDescriptor(matrix, list(matrix.shape), list(matrix.stride()), block, layout)
        described.base = base
        return described

    (part_m, part_n), block_k = hopper_parts(config), config.block_k
    shard, workspace = _a_sides(operands, lambda matrix, base: describe(matrix, base, [part_m, block_k]))
    block_b = [part_n, block_k] if operands.b_is_transposed else [block_k, part_n]
    factors = [describe(matrix, base, block_b) for matrix, base in operands.factors]
    outs = [describe(matrix, base, [part_m, part_n]) for matrix, base in operands.outs]
    tiles, k = protocol.table.shape[0], operands.b.shape[0]
    total, total_tiles = None, None
    if operands.total is not None:
        total = operands.base("total")
        total_tiles = describe(operands.total, total, [part_m, part_n])
    addends, addend_tiles = operands.addends, None
    if operands.addend_rows is not None:
        matrix, addends = operands.addend_rows
        addend_tiles = describe(matrix, moving(matrix), [part_m, part_n])
    arguments: list[Any] = [shard, workspace, *filled(factors), *filled(outs)]
    arguments += [*filled([base for _, base in operands.outs]), *operands.extras]
    peers, at_peers, strip = operands.peers, list[Any](), [*hopper_strip(config)]
    for own in (operands.out, peers.spread) if peers else (None, None):
        maps = [describe(own, base, strip) for base in peers.at(own)] if peers and own is not None else []
        at_peers += maps + [None] * (MOST_PEERS - len(maps))
    arguments += [total, total_tiles, *at_peers, *operands.places_of_peers]
    arguments += [addends, addend_tiles]
    arguments += [*protocol.split_k, *protocol.arrays, tiles, *operands.widths, k, protocol.world_size]
    arguments += [operands.b_is_transposed, _has_two_sources(operands), protocol.traced, config.stages]
    arguments += [config.split_n, config.block_m < 128, operands.epilogue.bits]
    arguments += [operands.addend_count, len(outs), protocol.shares is not None, len(peers.distances) if peers else 0]
    return Launch(matmul_hopper_kernel, protocol.programs(), arguments, {"num_warps": 4})


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
