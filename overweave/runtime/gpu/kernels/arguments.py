"""What arguments of kernels are made of on the host: stand-ins for tensors that move, descriptors, tables of tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from overweave.ir.tile_order import TileRow


@dataclass
class Moving:
    """A tensor whose address changes from call to call; stands for it in descriptors and arguments."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """Where the tensor of the next launch lies."""
        return self.address


def moving(tensor: torch.Tensor) -> Moving:
    """A stand-in that starts at `tensor`."""
    return Moving(tensor.data_ptr(), tensor.dtype)


def table_tensor(rows: tuple[TileRow, ...], device: torch.device) -> torch.Tensor:
    """A tile order as the kernels read it: int32 `[tiles, columns]`."""
    return torch.tensor(rows, dtype=torch.int32, device=device).reshape(-1, len(TileRow._fields))


def descriptor(matrix: torch.Tensor, block: list[int], base: Any = None) -> TensorDescriptor:
    """A bulk-tensor descriptor of a row-major matrix whose rows start at multiples of 16 bytes."""
    described = TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), block)
    if base is not None:
        described.base = base
    return described
