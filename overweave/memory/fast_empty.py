"""Allocate uninitialised matrices with the least host time: every call needs one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from overweave.compat.torch_names import cuda_getDevice, empty_strided_cuda

Make = Callable[[tuple[int, int], torch.dtype], torch.Tensor]


def empty_factory(device: torch.device) -> Make:
    """Return the function that allocates a row-major matrix on a device."""
    # The allocation function of Inductor's generated code. A CPU build of torch has none.
    empty: Callable[..., torch.Tensor] | None = empty_strided_cuda
    index = device.index

    def by_torch(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def on_gpu(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        if empty is None or cuda_getDevice() != index:
            return by_torch(shape, dtype)
        return empty(shape, (shape[1], 1), dtype)

    return on_gpu if device.type == "cuda" else by_torch
