"""Calls on tensors of a GPU that is not the thread's current one: it becomes that meanwhile, as in torch's own calls.

A new thread's current GPU is the first one, whichever its process chose. Streams, kernels and copies are of the current
one, so a call that did not look would go to a GPU that its tensors are not on.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeGuard, TypeVar

import torch

from overweave.compat.torch_names import cuda_getDevice

_T = TypeVar("_T")
ALIGNED_BYTES = 16  # where kernels expect a tensor to begin


def is_away(tensor: object) -> TypeGuard[torch.Tensor]:
    """Whether this is a tensor on a GPU that is not the current one."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_cuda:
        return False
    # Not is_available, which asks the driver: where no GPU is in use, no tensor lies on one, but for fake ones.
    return torch.cuda.is_initialized() and bool(cuda_getDevice() != tensor.device.index)


def run_on(device: torch.device, call: Callable[..., _T], *arguments: Any, **options: Any) -> _T:
    """A call with this GPU as the current one."""
    with current(device):
        return call(*arguments, **options)


def is_captured(tensor: torch.Tensor) -> bool:
    """Whether what is launched on this tensor now becomes part of a CUDA graph of the caller's."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def own_device() -> torch.device:
    """The current GPU, or the CPU of a machine without one."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def current(device: torch.device) -> AbstractContextManager[object]:
    """A GPU is the current one inside; of the CPU, nothing."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
