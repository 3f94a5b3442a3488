"""Runs an example on ranks: four emulated ones, or those that torchrun started, with `--cuda` each on a GPU of its own.

On GPUs it uses no NVLink multicast, and refuses to start where the environment asks for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from overweave.hardware.multicast import require_off, switch_off
from overweave.runtime.host.processes import run_ranks

IS_ON_GPUS = "--cuda" in sys.argv


def device() -> torch.device:
    """The one of this rank."""
    return torch.device("cuda", torch.cuda.current_device()) if IS_ON_GPUS else torch.device("cpu")


def on_ranks(function: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """What the function returns on rank 0, and None on the other ranks of torchrun."""
    if "LOCAL_RANK" not in os.environ:
        return run_ranks(function, 4, timeout_s=timeout_s)[0]
    if IS_ON_GPUS:
        switch_off(os.environ)
        require_off("run an example on GPUs", os.environ)
        own = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(own)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=own)
    else:
        dist.init_process_group("gloo")
    found = function()
    is_first = dist.get_rank() == 0
    dist.destroy_process_group()
    return found if is_first else None
