"""The GPU side of the operators, loaded when the first CUDA tensor comes: without triton overweave still imports."""

from __future__ import annotations

import torch

from overweave.ir.plan import Plan
from overweave.memory.group import Group
from overweave.ops.call.prepared import Bound
from overweave.runtime.backends import load

Tensors = dict[str, torch.Tensor]


def bind_on_gpu(plan: Plan, group: Group, tensors: Tensors) -> Bound:
    """The plan bound to this rank's GPU, and to the group's workspace there if it moves anything itself. Collective."""
    run: Bound = load("gpu launch")(plan, group, tensors)
    return run
