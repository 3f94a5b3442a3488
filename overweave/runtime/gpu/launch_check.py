"""A trial compilation for `overweave doctor`: whether Triton, ptxas and the driver work together."""

from __future__ import annotations

import torch
import triton

from overweave.runtime.backends import load
from overweave.runtime.gpu.launcher import Launch, PackedLaunch
from overweave.runtime.kernel_calls.protocol import notify_call

HOPPER = 9


def launch_check(device: torch.device) -> bool:
    """Compile a small kernel anew and load it, without a launch. Return whether its launches bypass Triton's wrapper.

    Raises KernelUnavailable with the compiler's message, or with the name that the Hopper kernel cannot import.
    """
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.always_compile = True
        launch = Launch(notify_call((), device))
    if torch.cuda.get_device_properties(device).major == HOPPER:
        load("hopper kernel")
    return isinstance(launch.start, PackedLaunch) and launch.start.is_quick
