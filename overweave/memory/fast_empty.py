"""Allocate uninitialised matrices with the least host time: every call needs one."""

from __future__ import annotations

from collections.abc import Callable

import torch

Make = Callable[[tuple[int, int], torch.dtype], torch.Tensor]
# The allocation function of Inductor's generated code. A CPU build of torch has none.
_EMPTY_ON_GPU: Callable[..., torch.Tensor] | None = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def empty_factory(device: torch.device) -> Make:
    """Return the function that allocates a row-major matrix on a device."""
    empty, index = _EMPTY_ON_GPU, device.index

    def by_torch(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def on_gpu(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        if empty is None or torch._C._cuda_getDevice() != index:
            return by_torch(shape, dtype)
        return empty(shape, (shape[1], 1), dtype)

    return on_gpu if device.type == "cuda" else by_torch
