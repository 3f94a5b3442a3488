"""`Colwise`, `Rowwise` and `PrepareGather`: torch's styles of tensor parallelism with overlapped collectives.

parallelize_module(block, mesh, {
    "attention": ow.PrepareGather(input_layouts=Shard(1)),
    "attention.q": ow.Colwise(), "attention.k": ow.Colwise(), "attention.v": ow.Colwise(),
    "attention.o": ow.Rowwise(output_layouts=Shard(1)),
})
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from overweave.adapters.parallel.gathering import Gathering
from overweave.adapters.parallel.linears import ColwiseLinear, Place, RowwiseLinear, local_part
from overweave.errors import InputError
from overweave.memory.group import process_group_of


class Colwise(ColwiseParallel):
    """torch's `ColwiseParallel`: each rank has its columns. A gather of the input overlaps with the matmul.

    input_layouts: `Replicate()`, or `Shard(dim)` of a dimension of rows, which is gathered at this matmul. Behind
    `PrepareGather` it is left out: layers that read one input share one gather. What overweave does not compute (an
    embedding, an output that is not sharded along its last dimension, DTensor results) is torch's.
    Raises InputError for a layer that has a style already and for widths that ranks do not divide.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        (given,), (made,) = self.input_layouts, self.output_layouts
        is_ours = self.use_local_output and _is_last(made) and not _is_last(given)
        if not isinstance(module, nn.Linear) or not is_ours or given.is_partial():
            return super()._apply(module, device_mesh)
        _check(module, device_mesh, module.out_features, "out_features")
        distribute_module(module, device_mesh, self._partition_linear_fn)
        return _become(module, ColwiseLinear, Place(device_mesh, given, made), Replicate())


class Rowwise(RowwiseParallel):
    """torch's `RowwiseParallel`: each rank multiplies its columns. The sum over ranks overlaps with the matmul.

    output_layouts: `Replicate()`, an all-reduce, or `Shard(dim)` of a dimension of rows, a reduce-scatter. What
    overweave does not compute (an embedding, an input that is not sharded along its last dimension, DTensor results) is
    torch's. Raises InputError for a layer that has a style already and for widths that ranks do not divide.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        (given,), (made,) = self.input_layouts, self.output_layouts
        is_ours = self.use_local_output and _is_last(given) and not made.is_partial() and not _is_last(made)
        if not isinstance(module, nn.Linear) or not is_ours:
            return super()._apply(module, device_mesh)
        _check(module, device_mesh, module.in_features, "in_features")
        distribute_module(module, device_mesh, self._partition_linear_fn)
        return _become(module, RowwiseLinear, Place(device_mesh, given, made), Shard(-1))


class PrepareGather(ParallelStyle):
    """torch's `PrepareModuleInput` from `Shard(dim)` to `Replicate()`, that does not wait for the gather.

    The module gets a tensor of the gathered shape. Its first `Colwise` layer gathers it while it multiplies, and the
    others multiply what was gathered; any other operation gathers it, once. input_layouts: of the first positional
    argument, `Shard(dim)`. input_kwarg_layouts: of arguments by name, `{"hidden_states": Shard(1)}`; a module may be
    called in either way.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
    ) -> None:
        super().__init__()
        self.input_layouts, self.input_kwarg_layouts = input_layouts, dict(input_kwarg_layouts or {})
        for placement in (input_layouts, *self.input_kwarg_layouts.values()):
            if placement is not None and (not placement.is_shard() or _is_last(placement)):
                cure = "Pass Shard(dim) of a dimension of rows"
                raise InputError("PrepareGather: input_layouts", f"got {placement}", cure)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = process_group_of(device_mesh)

        def prepared(x: object, placement: Placement | None) -> object:
            if placement is None or not isinstance(x, torch.Tensor):
                return x
            if torch.compiler.is_compiling():
                whole = (
                    x if isinstance(x, DTensor) else DTensor.from_local(x, device_mesh, [placement], run_check=False)
                )
                return whole.redistribute(placements=[Replicate()])
            shard = local_part(x, device_mesh, placement)
            return Gathering(shard, placement.dim, group.group_name, group.size())  # type: ignore[attr-defined]

        def before(
            _: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            first = [prepared(given[0], self.input_layouts)] if given else []
            layouts = self.input_kwarg_layouts
            return (*first, *given[1:]), {name: prepared(x, layouts.get(name)) for name, x in named.items()}

        module.register_forward_pre_hook(before, with_kwargs=True)
        return module


def _check(module: nn.Linear, mesh: DeviceMesh, width: int, called: str) -> None:
    if isinstance(module, (ColwiseLinear, RowwiseLinear)) or isinstance(module.weight, DTensor):
        cure = "Name each layer in one plan only"
        raise InputError("a style for a linear layer", f"it has one already: {type(module).__name__}", cure)
    ranks = process_group_of(mesh).size()
    if width % ranks:
        cure = "Choose a width that does, fewer ranks, or torch's own style"
        raise InputError(f"a style for a linear layer: {called}", f"{width} does not divide by {ranks} ranks", cure)


def _become(module: nn.Linear, kind: type[nn.Linear], place: Place, multiplies: Placement) -> nn.Module:
    """multiplies: the placement that the matmul itself wants."""
    module.__class__ = kind
    module.overweave_place, module.overweave_multiplies = place, multiplies  # type: ignore[assignment]
    return module


def _is_last(placement: Any) -> bool:
    return bool(placement.is_shard()) and placement.dim == -1
