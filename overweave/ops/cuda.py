"""The GPU side of the operators, loaded when the first CUDA tensor comes: a machine without triton imports overweave."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch

from overweave.ir.plan import Plan
from overweave.memory.group import Group


def bind_on_gpu(plan: Plan, group: Group, tensors: dict[str, torch.Tensor]) -> Callable[[dict[str, torch.Tensor]], None]:
    """The plan bound to this rank's GPU and the group's workspace there. Collective on first use of the group."""
    workspaces = import_module("overweave.memory.workspace")
    launch = import_module("overweave.runtime.launch")
    device = tensors["x"].device
    workspace = workspaces.Workspace.of(group, device)
    run: Callable[[dict[str, torch.Tensor]], None] = launch.bind(plan, workspace, tensors)
    return run
