"""`Colwise`, `Rowwise` and `PrepareGather`: torch's styles of tensor parallelism with overlapped collectives.

parallelize_module(block, mesh, {
    "attention": ow.PrepareGather(input_layouts=Shard(1)),
    "attention.q": ow.Colwise(), "attention.k": ow.Colwise(), "attention.v": ow.Colwise(),
    "attention.o": ow.Rowwise(output_layouts=Shard(1)),
})
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from overweave.adapters.parallel.gathering import SITE, gathered_later
from overweave.adapters.parallel.linears import ColwiseLinear, LayerPlacement, RowwiseLinear, derived, local_part
from overweave.adapters.report import site
from overweave.adapters.rows import RowGather
from overweave.errors import InputError
from overweave.functional import check_untransformed, is_transformed
from overweave.ops.call.operands import DTYPES
from overweave.ops.dispatch.route import GroupRank as RankPlace
from overweave.ops.dispatch.route import place_of


class Colwise(ColwiseParallel):
    """torch's `ColwiseParallel`: each rank has its columns. A gather of the input overlaps with the matmul.

    input_layouts: `Replicate()`, or `Shard(dim)` of a dimension of rows, which is gathered at this matmul. Behind
    `PrepareGather` it is left out: layers that read one input share one gather. What overweave does not compute (an
    embedding, a layer whose forward is not `nn.Linear`'s, an output that is not sharded along its last dimension,
    DTensor results) is torch's, and `overweave.report()` says so.
    Raises InputError for a layer that has a style already and for widths that ranks do not divide.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        (given,), (made,) = self.input_layouts, self.output_layouts
        is_ours = _is_last(made) and not _is_last(given) and not given.is_partial()
        reason = _reason(module, self.use_local_output, is_ours)
        if reason:
            site("Colwise").by_torch[reason] += 1
            return super()._apply(module, device_mesh)
        path = _checked(module, device_mesh, "out_features")
        distribute_module(module, device_mesh, self._partition_linear_fn)
        return _become(module, ColwiseLinear, LayerPlacement.of(path, device_mesh, (given, made, Replicate()), given))


class Rowwise(RowwiseParallel):
    """torch's `RowwiseParallel`: each rank multiplies its columns. The sum over ranks overlaps with the matmul.

    output_layouts: `Replicate()`, an all-reduce, or `Shard(dim)` of a dimension of rows, a reduce-scatter. What
    overweave does not compute (an embedding, a layer whose forward is not `nn.Linear`'s, an input that is not sharded
    along its last dimension, DTensor results) is torch's, and `overweave.report()` says so. Raises InputError for a
    layer that has a style already and for widths that ranks do not divide.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        (given,), (made,) = self.input_layouts, self.output_layouts
        is_ours = _is_last(given) and not made.is_partial() and not _is_last(made)
        reason = _reason(module, self.use_local_output, is_ours)
        if reason:
            site("Rowwise").by_torch[reason] += 1
            return super()._apply(module, device_mesh)
        path = _checked(module, device_mesh, "in_features")
        distribute_module(module, device_mesh, self._partition_linear_fn)
        return _become(module, RowwiseLinear, LayerPlacement.of(path, device_mesh, (given, made, Shard(-1)), made))


class PrepareGather(ParallelStyle):
    """torch's `PrepareModuleInput` from `Shard(dim)` to `Replicate()`, that does not wait for the gather.

    The module gets a tensor of the gathered shape. Its first `Colwise` layer gathers it while it multiplies, and the
    others multiply what was gathered; any other operation gathers it, once, by the library: `overweave.report()` counts
    both. Its gradient is whole and the same on every rank, as that of torch's `Replicate()`. What reads it, reads it on
    every rank. input_layouts: of the first positional argument, `Shard(dim)`. input_kwarg_layouts: of arguments by
    name, `{"hidden_states": Shard(1)}`; a module may be called in either way.
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
        where, path = (device_mesh, place_of(device_mesh)), _path_of(module)

        def before(
            _: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            layouts = self.input_kwarg_layouts
            is_first = bool(given) and self.input_layouts is not None
            if not is_first and not any(name in named for name in layouts):
                raise self._missed(path, given, named)
            first = [_prepared(given[0], self.input_layouts, where)] if given else []
            found = {name: _prepared(x, layouts.get(name), where) for name, x in named.items()}
            return (*first, *given[1:]), found

        module.register_forward_pre_hook(before, with_kwargs=True)
        return module

    def _missed(self, path: str, given: tuple[Any, ...], named: dict[str, Any]) -> InputError:
        """The error for a call without any input that has a layout: its module would compute with a rank's own rows."""
        asked = f"gather the input of module {path!r}"
        found = f"it was called with {len(given)} arguments by position and {sorted(named)} by name, none with a layout"
        return InputError(asked, found, "Name it in input_kwarg_layouts, or, of the first argument, in input_layouts")


def _prepared(x: object, placement: Any, where: tuple[DeviceMesh, RankPlace]) -> object:
    """An input as the module gets it: gathered, or to be gathered when it is read."""
    if placement is None or not isinstance(x, torch.Tensor):
        return x
    (mesh, place), is_compiled = where, torch.compiler.is_compiling()
    dim = placement.dim % max(1, x.dim())
    reason = ""
    if dim >= x.dim() - 1 or (isinstance(x, DTensor) and x.device_mesh != mesh):
        reason = f"{placement} of it is no dimension of rows of this mesh"
    elif x.dtype not in DTYPES:
        reason = f"it holds {x.dtype}"
    if is_compiled or reason:
        if not is_compiled:
            site(SITE).by_torch[reason] += 1
        whole = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [placement], run_check=False)
        whole = whole.redistribute(placements=[Replicate()])
        return whole if is_compiled else whole.to_local()
    if is_transformed():
        check_untransformed("PrepareGather", mesh, (x,))
    shard, size = local_part(x, placement)
    whole_size = shard.shape[dim] * place.world_size if size is None else size
    return gathered_later(shard, RowGather(dim, place.name, whole_size))


def _reason(module: nn.Module, is_local: bool, is_ours: bool) -> str:
    """Why a layer gets torch's style; empty: it gets overweave's."""
    kind = type(module)
    if not isinstance(module, nn.Linear):
        return f"a layer that is a {kind.__name__}"
    if kind.forward not in (nn.Linear.forward, ColwiseLinear.forward, RowwiseLinear.forward):
        return f"a layer that is a {kind.__name__}, whose forward is its own"
    if "forward" in vars(module):
        return f"a layer that is a {kind.__name__}, whose forward was replaced"
    if not is_local:
        return "a layer whose result is a DTensor"
    return "" if is_ours else "a layer with layouts that no operator of overweave has"


def _checked(module: Any, mesh: DeviceMesh, called: str) -> str:
    """The layer's path in the model that the plan is for. Raises InputError, which names it."""
    path, width, ranks = _path_of(module), getattr(module, called), place_of(mesh).world_size
    asked = f"a style for the linear layer {path!r}"
    if isinstance(module, (ColwiseLinear, RowwiseLinear)) or isinstance(module.weight, DTensor):
        cure = "Name each layer in one plan only"
        raise InputError(asked, f"it has one already: {type(module).__name__}", cure)
    if width % ranks:
        cure = "Choose a width that does, fewer ranks, or torch's own style"
        raise InputError(f"{asked}: {called}", f"{width} does not divide by {ranks} ranks", cure)
    return path


def _path_of(module: nn.Module) -> str:
    """A layer's name in the outermost model that `parallelize_module` goes through, which does not pass it on."""
    path, frame = "", sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        if frame.f_code is parallelize_module.__code__:
            names = frame.f_locals["module"].named_modules()
            path = next((name for name, each in names if each is module), path)
    return path


def _become(module: nn.Module, kind: type[nn.Linear], place: LayerPlacement) -> nn.Module:
    module.__class__ = derived(kind, type(module))  # type: ignore[arg-type]
    module.overweave_place = place  # type: ignore[assignment]
    return module


def _is_last(placement: Any) -> bool:
    return bool(placement.is_shard()) and placement.dim == -1
