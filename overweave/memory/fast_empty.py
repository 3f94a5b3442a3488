"""New matrices, nothing in them, made the way that asks least of the host: every call needs one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from overweave.compat.torch_names import cuda_getDevice, empty_strided_cuda

Make = Callable[[tuple[int, int], torch.dtype], torch.Tensor]


def maker(device: torch.device) -> Make:
    """What makes a row-major matrix on a device."""
    # What the code calls that torch's compiler writes; of a CPU's torch, there is none.
    empty: Callable[..., torch.Tensor] | None = empty_strided_cuda
    index = device.index

    def by_torch(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def on_gpu(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        if empty is None or cuda_getDevice() != index:
            return by_torch(shape, dtype)
        return empty(shape, (shape[1], 1), dtype)

    return on_gpu if device.type == "cuda" else by_torch
