"""A kernel of ours made on a GPU, for `overweave doctor`: whether Triton, its assembler and the driver get along."""

from __future__ import annotations

import torch
import triton

from overweave.runtime.backends import load
from overweave.runtime.gpu.launcher import Launch, PackedLaunch
from overweave.runtime.kernel_calls.protocol import notify_call

HOPPER = 9


def launch_check(device: torch.device) -> bool:
    """Compiles a small kernel anew, and loads it; nothing is launched. True if its launches go past Triton's wrapper.

    Raises KernelUnavailable with what the compiler said, or with the name that the Hopper kernel lacks.
    """
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.always_compile = True
        launch = Launch(notify_call((), device))
    if torch.cuda.get_device_properties(device).major == HOPPER:
        load("hopper kernel")
    return isinstance(launch.start, PackedLaunch) and launch.start.is_quick
