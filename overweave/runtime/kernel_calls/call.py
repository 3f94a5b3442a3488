"""A kernel with all its arguments, and what these are made of: stand-ins for tensors that move, descriptors, tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from overweave.ir.tile_order import TileRow
from overweave.kernels.arguments import LaunchTiles, SignalWords

# Of a kernel that starts before the one in front ends (memory/device/dependent_launch.py).
DEPENDENT_LAUNCH: dict[str, int] = {"launch_pdl": True}


class KernelCall(NamedTuple):
    """One launch of a kernel. arguments: all of them, in the kernel's order. options: how it is compiled.

    programs: how many it has; of a kernel whose programs claim tiles, how many it has at most.
    """

    kernel: Any
    arguments: list[Any]
    options: dict[str, int]
    programs: int = 1


@dataclass
class Moving:
    """A tensor whose address changes from call to call; stands for it in descriptors and arguments."""

    address: int
    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()

    def data_ptr(self) -> int:
        """Where the tensor of the next launch lies."""
        return self.address

    def stride(self) -> tuple[int, ...]:
        """As of a tensor."""
        return self.strides


MatrixInput = torch.Tensor | Moving


def stand_in_for(tensor: torch.Tensor) -> Moving:
    """A stand-in that starts at `tensor`."""
    return Moving(tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def as_words(matrix: MatrixInput) -> MatrixInput:
    """The same memory as int32."""
    if isinstance(matrix, torch.Tensor):
        return matrix.view(torch.int32)
    matrix.dtype = torch.int32
    return matrix


class TileKernelArgs(NamedTuple):
    """What every kernel of tiles is given of its plan. traced: it writes down when each tile ran."""

    queue: LaunchTiles
    protocol: SignalWords
    traced: bool = False


def table_tensor(rows: tuple[TileRow, ...], device: torch.device) -> torch.Tensor:
    """A tile order as the kernels read it: int32 `[tiles, columns]`."""
    return torch.tensor(rows, dtype=torch.int32, device=device).reshape(-1, len(TileRow._fields))


def addresses_tensor(rows: Any, device: torch.device) -> torch.Tensor:
    """Addresses as the kernels read them: int64, of any shape."""
    return torch.tensor(rows, dtype=torch.int64, device=device)


def descriptor(matrix: MatrixInput, block: list[int], is_transposed: bool = False) -> TensorDescriptor:
    """A bulk-tensor descriptor of a matrix whose rows (columns, if transposed) start at multiples of 16 bytes."""
    return TensorDescriptor(matrix, *storage_layout(matrix, is_transposed), block)


def storage_layout(matrix: MatrixInput, is_transposed: bool) -> tuple[list[int], list[int]]:
    """Shape and strides of a matrix as it lies in memory, row-major."""
    step = -1 if is_transposed else 1
    return list(matrix.shape)[::step], list(matrix.stride())[::step]


# Where the tiles of a kernel store at other ranks (kernels/stored.py), as its call takes it.


class Peers(NamedTuple):
    """places: int64, a row of two for each rank (memory/lower.peer_slot_offsets); behind them where sums of peers lie
    here, or 0, and how far apart strips are stored (bind.py). distances: of the slot of each peer behind the own one in
    bytes, the next rank first. spread: the own instance of the buffer where sums go at peers, if they go to every rank.
    """

    places: torch.Tensor
    distances: tuple[int, ...]
    spread: torch.Tensor | None

    @property
    def everyone(self) -> int | None:
        """How many ranks there are, if sums go to all of them."""
        return None if self.spread is None else len(self.distances) + 1

    def at(self, own: MatrixInput) -> Iterator[Moving]:
        """A buffer of the workspace as it lies at each peer, by its own instance."""
        shape, strides = tuple(own.shape), own.stride()
        return (Moving(own.data_ptr() + distance, own.dtype, shape, strides) for distance in self.distances)
