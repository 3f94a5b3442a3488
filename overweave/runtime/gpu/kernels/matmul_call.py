"""What the tile kernels of a matmul are given: the same on a GPU, under the interpreter and for the lint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from overweave.ir.epilogue import NO_EPILOGUE, Epilogue
from overweave.ir.plan import MOST_WEIGHTS, MatmulConfig, numbered
from overweave.kernels.arguments import AtPeers, Ends, Products, SignalWords, TileQueue
from overweave.memory.cuda.heap import sms_for_copies
from overweave.memory.cuda.shares import Shares
from overweave.runtime.gpu.kernels.arguments import Moving, descriptor, moving
from overweave.runtime.gpu.kernels.peers import Peers

# fp32 means fp32: no TF32. For 16-bit operands the name decides nothing.
PRECISION = {torch.float32: "ieee", torch.float8_e4m3fn: "fp8"}


@dataclass(frozen=True)
class Operands:
    """What a tile kernel multiplies. Example tensors: `bases` says which of them move; with None, kernels are given the
    tensors themselves.

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
    bases: Mapping[str, Moving] | None
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

    def base(self, name: str) -> Any:
        """The stand-in of an operand, fixed if it does not move; None if there is no such operand."""
        return self._stand_in(name, getattr(self, name))

    @property
    def factors(self) -> list[tuple[torch.Tensor, Any]]:
        """Every weight as it lies in memory, row-major, with its stand-in; behind them the gate."""
        weights = [self.b, *(b for b, _ in self.more), *([] if self.gate is None else [self.gate])]
        return self._numbered("b", [self.stored(b) for b in weights])

    @property
    def outs(self) -> list[tuple[torch.Tensor, Any]]:
        """The output of every weight, with its stand-in."""
        return self._numbered("out", [self.out, *(out for _, out in self.more)])

    @property
    def products(self) -> Products:
        """What the kernel writes."""
        outs, widths = filled([base for _, base in self.outs]), filled([out.shape[1] for out, _ in self.outs])
        return Products(*outs, *widths, self.base("total"))  # type: ignore[call-arg]  # lists of MOST_WEIGHTS

    def stored(self, b: torch.Tensor) -> torch.Tensor:
        """A weight as it lies in memory, row-major."""
        return b.t() if self.b_is_transposed else b

    def _numbered(self, name: str, tensors: list[torch.Tensor]) -> list[tuple[torch.Tensor, Any]]:
        return [(tensor, self._stand_in(numbered(name, index), tensor)) for index, tensor in enumerate(tensors)]

    def _stand_in(self, name: str, tensor: torch.Tensor | None) -> Any:
        return tensor if tensor is None or self.bases is None else self.bases.get(name) or moving(tensor)

    @property
    def ends(self) -> Ends:
        """What the epilogue reads; scales that are not read stand for the others."""
        own, rest = self.base("scale_x"), self.base("scales")
        scales = (rest if own is None else own, own if rest is None else rest)
        return Ends(self.base("bias"), self.base("residual"), *scales, self.base("scale_w"))

    @property
    def at_peers(self) -> AtPeers:
        """Where tiles store at other ranks, as the kernel takes it."""
        return AtPeers(self.peers.places, self.peers.everyone) if self.peers else AtPeers()

    @property
    def has_two_sources(self) -> bool:
        """Whether tiles read rows of both places of `a`."""
        return self.a_shard is not None and self.a_workspace is not None

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
    def queue(self) -> TileQueue:
        """The tiles, as a kernel takes them."""
        return TileQueue(self.table, self.claims, self.trace, self.table.shape[0])

    @property
    def signal_words(self) -> SignalWords:
        """What waits and signals, as a kernel takes it."""
        return SignalWords(self.signals, self.words, self.limits, self.world_size)


def filled(operands: list[Any]) -> list[Any]:
    """Those of every weight that a kernel has a place for; None where there is none."""
    return operands + [None] * (MOST_WEIGHTS - len(operands))


def programs_for(tiles: int, device: torch.device, sms_beside: int = 0) -> int:
    """One persistent program per SM, less those left to another kernel, or fewer if there are fewer tiles."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count - sms_beside - sms_for_copies()
    return max(1, min(sms, tiles))


def a_sides(operands: Operands, describe: Any) -> tuple[Any, Any]:
    """Descriptors of both places of `a`; a side that is not read stands for the other."""
    sides = [
        None if matrix is None else describe(matrix, operands.base(name))
        for name, matrix in (("a_shard", operands.a_shard), ("a_workspace", operands.a_workspace))
    ]
    return sides[0] or sides[1], sides[1] or sides[0]


def portable_arguments(config: MatmulConfig, operands: Operands, protocol: Protocol) -> list[Any]:
    """All arguments of `matmul_kernel`."""
    block_a = [config.block_m, config.block_k]
    block_b = [config.block_n, config.block_k] if operands.b_is_transposed else [config.block_k, config.block_n]
    sides = a_sides(operands, lambda matrix, base: descriptor(matrix, block_a, base))
    factors = [descriptor(matrix, block_b, base) for matrix, base in operands.factors]
    arguments: list[Any] = [*sides, *filled(factors), *subjects(operands, operands.addends, protocol)]
    arguments += [PRECISION.get(operands.b.dtype, "tf32"), operands.b_is_transposed, operands.has_two_sources]
    return [*arguments, protocol.traced, *constants(operands, protocol)]


def subjects(operands: Operands, addends: torch.Tensor | None, protocol: Protocol) -> list[Any]:
    """What both kernels take between their tensor descriptors and their constants."""
    own = [operands.products, operands.ends, addends, operands.at_peers]
    return [*own, protocol.shares, protocol.queue, protocol.signal_words, operands.b.shape[0]]


def constants(operands: Operands, protocol: Protocol) -> list[Any]:
    """Of both kernels, the constants that say what a tile may have: EPILOGUE, ADDENDS, WEIGHTS, SPLIT_K."""
    return [operands.epilogue.bits, operands.addend_count, len(operands.outs), protocol.shares is not None]
