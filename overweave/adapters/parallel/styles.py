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
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from overweave.adapters.packages import PLAIN, obstacle_of
from overweave.adapters.parallel.gathering import SITE, LazyGather, gather_lazily
from overweave.adapters.report import SITES, site
from overweave.adapters.rows import RowGather
from overweave.compat.torch_names import AsyncCollectiveTensor
from overweave.errors import InputError, OverweaveError
from overweave.functional import (
    all_gather_linear,
    check_untransformed,
    is_transformed,
    linear_all_reduce,
    linear_reduce_scatter,
)
from overweave.layers.linear import local
from overweave.layers.replicated import replicated_linear
from overweave.ops.call.operands import DTYPES
from overweave.ops.dispatch.route import GroupRank, group_rank_of

# A style changes a layer's class and keeps its parameters and hooks, so that state dicts and optimizers stay the same.


class LayerPlacement(NamedTuple):
    """The placements of a layer of a parallelize plan. path: its name in the model. group: the mesh's group, by name.

    input_placement, output_placement: of its input and its result. matmul_placement: of the matmul's input. rows: the
    Shard(dim) along which rows are gathered or scattered; None if they are not.
    """

    path: str
    mesh: DeviceMesh
    group: str
    input_placement: Placement
    output_placement: Placement
    matmul_placement: Placement
    rows: Placement | None

    @classmethod
    def of(
        cls, path: str, mesh: DeviceMesh, placements: tuple[Placement, Placement, Placement], rows: Placement
    ) -> LayerPlacement:
        """Build it from placements (input, output, matmul)."""
        return cls(path, mesh, group_rank_of(mesh).name, *placements, rows if rows.is_shard() else None)


class ColwiseLinear(nn.Linear):
    """The class of a `Colwise` layer: each rank computes its output columns, for all rows."""

    overweave_placement: LayerPlacement

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input: a `LazyGather`, or, by `input_layouts`, the rows of all ranks or this rank's. Returns `[.., n/W]`."""
        return _forward(self, input, "Colwise", _column_parallel)


class RowwiseLinear(nn.Linear):
    """The class of a `Rowwise` layer: each rank multiplies its input columns; products are summed over ranks."""

    overweave_placement: LayerPlacement

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input: this rank's columns. Returns, by `output_layouts`, all rows of the sum or this rank's."""
        return _forward(self, input, "Rowwise", _row_parallel)


@cache
def linear_subclass(subclass: type[nn.Linear], owner: type[nn.Linear]) -> type[nn.Linear]:
    """Return `subclass`, or its subclass for layers of class `owner`, which keeps `nn.Linear`'s forward."""
    return subclass if owner is nn.Linear else type(f"{subclass.__name__}Of{owner.__name__}", (subclass, owner), {})


def local_shard(x: Any, placement: Placement) -> tuple[torch.Tensor, int | None]:
    """Return (local shard, global size of the sharded dimension): a DTensor is first redistributed to `placement`.

    A plain tensor is taken as the local shard already; its global size is unknown, None.
    """
    size = None
    if isinstance(x, DTensor):
        if x.placements != (placement,):
            x = x.redistribute(placements=[placement])
        size = x.shape[placement.dim] if placement.is_shard() else None  # type: ignore[attr-defined]
        x = x.to_local()
    # A collective of torch may still run: a differentiable operation waits for it.
    return x.clone() if isinstance(x, AsyncCollectiveTensor) else x, size


def _forward(layer: Any, x: Any, name: str, compute: Any) -> torch.Tensor:
    """Run a layer by `compute`, or by torch's DTensor if overweave does not support the call; count which.

    name: of the style, in reports and errors. Raises InputError that names the layer.
    """
    if torch.compiler.is_compiling():
        return _by_dtensor(layer, x)
    placement, weight, bias, counts = layer.overweave_placement, layer.weight, layer.bias, SITES.get(name) or site(name)
    reason = _call_obstacle(placement, x, weight, bias)
    if reason:
        counts.by_torch[reason] += 1
        return _by_dtensor(layer, x)
    counts.by_overweave += 1
    if x.__class__ is LazyGather and hasattr(type(layer), "_get_fsdp_state"):
        # A differentiable read, which gathers x unfused: FSDP2 reshards the weight right after the layer's backward,
        # before the lazy gradient of x would read it.
        x = x.view_as(x)
    try:
        if is_transformed():  # before torch fails on a DTensor, with an error that does not name the layer
            check_untransformed(name, placement.group, (x,))
        y: torch.Tensor = compute(placement, x, weight, bias)
        return y
    except InputError as error:
        if placement.path and placement.path not in error.asked:
            raise _naming_layer(placement.path, error) from None
        raise


def _column_parallel(placement: LayerPlacement, x: Any, weight: Any, bias: Any) -> torch.Tensor:
    """Return this rank's columns of all rows; rows are gathered here if x is sharded or lazy."""
    if x.__class__ is LazyGather and x.group == placement.group and x.is_unmodified:
        return x.linear(local(weight), local(bias), weight)
    shard, size = local_shard(x, placement.input_placement)
    if not placement.input_placement.is_shard():
        return replicated_linear(shard, local(weight), local(bias), placement.group)
    size = size if size is not None and size % placement.mesh.size() else None
    y: torch.Tensor = all_gather_linear(
        shard, weight, bias, placement.mesh, dim=_dim(placement.input_placement), size=size
    )
    return y


def _row_parallel(placement: LayerPlacement, x: Any, weight: Any, bias: Any) -> torch.Tensor:
    """Return the sum of products over ranks: this rank's rows if the output is sharded, else all rows."""
    shard, _ = local_shard(x, placement.input_placement)
    if placement.output_placement.is_shard():
        return linear_reduce_scatter(
            shard, local(weight), local(bias), placement.group, dim=_dim(placement.output_placement)
        )
    y: torch.Tensor = linear_all_reduce(shard, local(weight), local(bias), placement.group)
    return y


# Of a layer whose input is whole (Colwise), and of one whose input is cut (Rowwise): weight and bias.
_PLACED = {False: ((Shard(0),), (Shard(0),)), True: ((Shard(1),), (Replicate(),))}


def _call_obstacle(placement: LayerPlacement, x: Any, weight: Any, bias: Any) -> str:
    """Return why overweave does not support a call, so that torch computes it; empty if it does."""
    if not isinstance(weight, DTensor):
        return f"its weight is a {type(weight).__name__}"
    # Inlined from obstacle_of, since this runs at every call.
    if weight._local_tensor.__class__ not in PLAIN or weight.dtype not in DTYPES:
        return obstacle_of(weight)
    placed, placed_bias = _PLACED[placement.matmul_placement.is_shard()]
    if weight._spec.placements != placed:
        return f"its weight is {weight._spec.placements[0]}"
    if isinstance(bias, DTensor) and bias._spec.placements != placed_bias:
        return f"its bias is {bias._spec.placements[0]}"
    if weight._spec.mesh is not placement.mesh and weight._spec.mesh.ndim != 1:
        return "its weight lies on a mesh of several dimensions"
    if isinstance(x, DTensor) and x.device_mesh != placement.mesh:
        return "its input lies on another mesh"
    if placement.rows is not None and _dim(placement.rows) % x.dim() == x.dim() - 1:
        return f"{placement.rows} of it is no dimension of rows"
    return ""


def _by_dtensor(layer: Any, x: Any) -> torch.Tensor:
    """Compute as torch's own styles do. torch.compile traces this, and `install(graphs=True)` fuses the collectives."""
    _, mesh, _, input_placement, output_placement, matmul_placement, _ = layer.overweave_placement
    dtensor = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [input_placement], run_check=False)
    if dtensor.placements != (matmul_placement,):
        dtensor = dtensor.redistribute(placements=[matmul_placement])
    y: Any = nn.functional.linear(dtensor, layer.weight, layer.bias)
    if y.placements != (output_placement,):
        y = y.redistribute(placements=[output_placement])
    result: torch.Tensor = y.to_local()
    return result


def _naming_layer(path: str, error: InputError) -> OverweaveError:
    """Return the error with the layer's name in it."""
    return type(error)(f"layer {path!r}: {error.asked}", error.found, error.cure)


def _dim(placement: Any) -> int:
    dim: int = placement.dim
    return dim


class Colwise(ColwiseParallel):
    """torch's `ColwiseParallel`: each rank computes its columns. The all-gather of the input overlaps with the matmul.

    input_layouts: `Replicate()`, or `Shard(dim)` of a dimension of rows, which this layer gathers. Leave it out
    after `PrepareGather`: layers that read one input share one gather. torch computes what overweave does not support
    (an embedding, a layer whose forward is not `nn.Linear`'s, an output that is not sharded along its last dimension,
    DTensor results), and `overweave.report()` counts it.
    Raises InputError for a layer that has a style already, and if W does not divide the width.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Shard a layer's parameters by columns and change its class; torch's style if it is not supported."""
        (input_placement,), (output_placement,) = self.input_layouts, self.output_layouts
        is_supported = (
            _is_last_dim(output_placement) and not _is_last_dim(input_placement) and not input_placement.is_partial()
        )
        reason = _layer_obstacle(module, self.use_local_output, is_supported)
        if reason:
            site("Colwise").by_torch[reason] += 1
            return super()._apply(module, device_mesh)
        path = _check_layer(module, device_mesh, "out_features")
        distribute_module(module, device_mesh, self._partition_linear_fn)
        return _change_class(
            module,
            ColwiseLinear,
            LayerPlacement.of(path, device_mesh, (input_placement, output_placement, Replicate()), input_placement),
        )


class Rowwise(RowwiseParallel):
    """torch's `RowwiseParallel`: each rank multiplies its columns. The sum over ranks overlaps with the matmul.

    output_layouts: `Replicate()`, an all-reduce, or `Shard(dim)` of a dimension of rows, a reduce-scatter. torch
    computes what overweave does not support (an embedding, a layer whose forward is not `nn.Linear`'s, an input that is
    not sharded along its last dimension, DTensor results), and `overweave.report()` counts it. Raises InputError for a
    layer that has a style already, and if W does not divide the width.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Shard a layer's weight along its inputs and change its class; torch's style if it is not supported."""
        (input_placement,), (output_placement,) = self.input_layouts, self.output_layouts
        is_supported = (
            _is_last_dim(input_placement) and not output_placement.is_partial() and not _is_last_dim(output_placement)
        )
        reason = _layer_obstacle(module, self.use_local_output, is_supported)
        if reason:
            site("Rowwise").by_torch[reason] += 1
            return super()._apply(module, device_mesh)
        path = _check_layer(module, device_mesh, "in_features")
        distribute_module(module, device_mesh, self._partition_linear_fn)
        return _change_class(
            module,
            RowwiseLinear,
            LayerPlacement.of(path, device_mesh, (input_placement, output_placement, Shard(-1)), output_placement),
        )


class PrepareGather(ParallelStyle):
    """torch's `PrepareModuleInput` from `Shard(dim)` to `Replicate()`, with a lazy gather.

    The module gets a tensor of the gathered shape. Its first `Colwise` layer gathers it while it multiplies, and the
    others reuse the gathered tensor; any other operation gathers it, once, by torch's all_gather: `overweave.report()`
    counts both. Its gradient is whole and the same on every rank, as that of torch's `Replicate()`. All ranks must read
    it, or none. input_layouts: of the first positional argument, `Shard(dim)`. input_kwarg_layouts: of keyword
    arguments, `{"hidden_states": Shard(1)}`; a module may be called either way. Raises InputError for other layouts.
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
            if placement is not None and (not placement.is_shard() or _is_last_dim(placement)):
                cure = "Pass Shard(dim) of a dimension of rows"
                raise InputError("PrepareGather: input_layouts", f"got {placement}", cure)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Register a pre-forward hook that replaces the inputs with a layout by lazy gathers."""
        mesh_and_group, path = (device_mesh, group_rank_of(device_mesh)), _path_of(module)

        def prepare_inputs(
            _: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            layouts = self.input_kwarg_layouts
            # Dynamo of torch 2.10 reads no bool(arguments).
            has_first = len(arguments) > 0 and self.input_layouts is not None
            if not has_first and not any(name in keywords for name in layouts):
                raise self._missing_input(path, arguments, keywords)
            prepared_first = [prepare_input(arguments[0], self.input_layouts, mesh_and_group)] if arguments else []
            prepared = {name: prepare_input(x, layouts.get(name), mesh_and_group) for name, x in keywords.items()}
            return (*prepared_first, *arguments[1:]), prepared

        module.register_forward_pre_hook(prepare_inputs, with_kwargs=True)
        return module

    def _missing_input(self, path: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> InputError:
        """Return the error of a call that passes no input with a layout: the module would see this rank's rows only."""
        asked = f"gather the input of module {path!r}"
        passed = f"{len(arguments)} arguments by position and {sorted(keywords)} by name"
        found = f"it was called with {passed}, none with a layout"
        return InputError(asked, found, "Name it in input_kwarg_layouts, or, of the first argument, in input_layouts")


def prepare_input(x: object, placement: Any, mesh_and_group: tuple[DeviceMesh, GroupRank]) -> object:
    """Return what the module gets for an input: a LazyGather, or, if that is unsupported, the gathered tensor."""
    if placement is None or not isinstance(x, torch.Tensor):
        return x
    (mesh, group), is_compiled = mesh_and_group, torch.compiler.is_compiling()
    dim = placement.dim % max(1, x.dim())
    reason = ""
    if dim >= x.dim() - 1 or (isinstance(x, DTensor) and x.device_mesh != mesh):
        reason = f"{placement} of it is no dimension of rows of this mesh"
    elif x.dtype not in DTYPES:
        reason = f"it holds {x.dtype}"
    if is_compiled or reason:
        if not is_compiled:
            site(SITE).by_torch[reason] += 1
        gathered = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [placement], run_check=False)
        gathered = gathered.redistribute(placements=[Replicate()])
        return gathered if is_compiled else gathered.to_local()
    if is_transformed():
        check_untransformed("PrepareGather", mesh, (x,))
    shard, size = local_shard(x, placement)
    size = shard.shape[dim] * group.world_size if size is None else size
    return gather_lazily(shard, RowGather(dim, group.name, size))


def _layer_obstacle(module: nn.Module, is_local_output: bool, is_supported: bool) -> str:
    """Return why overweave does not support a layer, so that it gets torch's style; empty if it does."""
    cls = type(module)
    if not isinstance(module, nn.Linear):
        return f"a layer that is a {cls.__name__}"
    if cls.forward not in (nn.Linear.forward, ColwiseLinear.forward, RowwiseLinear.forward):
        return f"a layer that is a {cls.__name__}, whose forward is its own"
    if "forward" in vars(module):
        return f"a layer that is a {cls.__name__}, whose forward was replaced"
    if not is_local_output:
        return "a layer whose result is a DTensor"
    return "" if is_supported else "a layer with layouts that no operator of overweave has"


def _check_layer(module: Any, mesh: DeviceMesh, dimension_name: str) -> str:
    """Return the layer's name in the model. Raises InputError if it has a style already, or W does not divide a width.

    dimension_name: the attribute with that width.
    """
    path, width, ranks = _path_of(module), getattr(module, dimension_name), group_rank_of(mesh).world_size
    asked = f"a style for the linear layer {path!r}"
    if isinstance(module, (ColwiseLinear, RowwiseLinear)) or isinstance(module.weight, DTensor):
        cure = "Name each layer in one plan only"
        raise InputError(asked, f"it has one already: {type(module).__name__}", cure)
    if width % ranks:
        cure = "Choose a width that does, fewer ranks, or torch's own style"
        raise InputError(f"{asked}: {dimension_name}", f"{width} does not divide by {ranks} ranks", cure)
    return path


def _path_of(module: nn.Module) -> str:
    """Return a layer's name in the outermost model passed to `parallelize_module`, read from the caller's frame."""
    path, frame = "", sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        if frame.f_code is parallelize_module.__code__:
            names = frame.f_locals["module"].named_modules()
            path = next((name for name, each in names if each is module), path)
    return path


def _change_class(module: nn.Module, subclass: type[nn.Linear], placement: LayerPlacement) -> nn.Module:
    """Change a layer's class in place, and give it its placements."""
    module.__class__ = linear_subclass(subclass, type(module))  # type: ignore[arg-type]
    module.overweave_placement = placement  # type: ignore[assignment]
    return module


def _is_last_dim(placement: Any) -> bool:
    return bool(placement.is_shard()) and placement.dim == -1
