"""torch's styles of tensor parallelism by torch's own names: a program switches to overweave's by its import line.

    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel
    from overweave.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

What overweave has no style for is torch's. `overweave.Colwise` and `overweave.Rowwise` are the same classes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import Placement
from torch.distributed.tensor import parallel as torch_parallel
from torch.distributed.tensor.parallel import (
    ParallelStyle,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from overweave.adapters.parallel.styles import Colwise as ColwiseParallel
from overweave.adapters.parallel.styles import Rowwise as RowwiseParallel
from overweave.adapters.parallel.styles import prepare_input
from overweave.ops.dispatch.route import group_rank_of

__all__ = [
    "ColwiseParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "loss_parallel",
    "parallelize_module",
]


class PrepareModuleInput(torch_parallel.PrepareModuleInput):
    """torch's `PrepareModuleInput`, whose gathers wait for the module's first matmul, as those of `PrepareGather` do.

    An input from `Shard(dim)` of rows to `Replicate()` is gathered lazily: the module gets a tensor of the gathered
    shape, and a DTensor of it only under `torch.compile`, whatever `use_local_output` says. All others are
    redistributed by torch. Arguments, errors and gradients are torch's.
    """

    def _prepare_input_arg(
        self, input: Any, mesh: DeviceMesh, input_layout: Placement | None, desired_layout: Placement | None
    ) -> Any:
        is_gather = input_layout is not None and input_layout.is_shard() and desired_layout is not None
        if is_gather and desired_layout.is_replicate() and isinstance(input, torch.Tensor):  # type: ignore[union-attr]
            prepared = prepare_input(input, input_layout, (mesh, group_rank_of(mesh)))
            is_lazy = not torch.compiler.is_compiling() or not self.use_local_output
            return prepared if is_lazy else prepared.to_local()  # type: ignore[attr-defined]
        return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group_rank_of(device_mesh)  # known before a call, which a compiler may read
        return super()._apply(module, device_mesh)
