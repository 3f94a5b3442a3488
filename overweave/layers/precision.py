"""What autocast makes of the factors of a matmul, as differentiable operations before it."""

from __future__ import annotations

from typing import overload

import torch

_CAST = (torch.bfloat16, torch.float16, torch.float32)  # neither fp64 nor fp8


def autocast_dtype(factor: torch.Tensor) -> torch.dtype | None:
    """The dtype in which `torch.nn.functional.linear` reads a factor where autocast is on; None: in its own."""
    if not torch._C._is_any_autocast_enabled() or factor.dtype not in _CAST:
        return None
    device = factor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


@overload
def cast(factor: torch.Tensor) -> torch.Tensor: ...
@overload
def cast(factor: torch.Tensor | None) -> torch.Tensor | None: ...
def cast(factor: torch.Tensor | None) -> torch.Tensor | None:
    """A factor as `torch.nn.functional.linear` reads it."""
    dtype = None if factor is None else autocast_dtype(factor)
    return factor if factor is None or dtype is None else factor.to(dtype)
