"""New matrices, nothing in them, made the way that asks least of the host: every call needs one."""

from __future__ import annotations

from collections.abc import Callable

import torch

Make = Callable[[tuple[int, int], torch.dtype], torch.Tensor]
# What the code calls that torch's compiler writes; of a CPU's torch, there is none.
_EMPTY_ON_GPU: Callable[..., torch.Tensor] | None = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def maker(device: torch.device) -> Make:
    """What makes a row-major matrix on a device."""
    empty, index = _EMPTY_ON_GPU, device.index

    def by_torch(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def on_gpu(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        if empty is None or torch._C._cuda_getDevice() != index:
            return by_torch(shape, dtype)
        return empty(shape, (shape[1], 1), dtype)

    return on_gpu if device.type == "cuda" else by_torch
