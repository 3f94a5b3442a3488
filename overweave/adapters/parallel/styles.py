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
from overweave.adapters.parallel.gathering import SITE, Gathering, gather_lazily
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
from overweave.ops.dispatch.route import GroupRank as RankPlace
from overweave.ops.dispatch.route import place_of

# A style changes the class of a layer and none of its attributes: state dicts, hooks and optimizers see no difference.


class LayerPlacement(NamedTuple):
    """The placements of a layer of a plan. path: its name in the model. group: the name of the mesh's group.

    input_placement, output_placement: of its input and its result. matmul_placement: of the matmul's input. rows: the
    Shard along which rows are gathered or scattered, if they are.
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
        return cls(path, mesh, place_of(mesh).name, *placements, rows if rows.is_shard() else None)


class ColwiseLinear(nn.Linear):
    """Each rank computes its columns of all rows."""

    overweave_place: LayerPlacement

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input: a `Gathering`, or what the style's `input_layouts` say: rows of all ranks, or this rank's."""
        return _forward(self, input, "Colwise", _column_parallel)


class RowwiseLinear(nn.Linear):
    """Each rank multiplies its columns of the input; the products are summed over ranks."""

    overweave_place: LayerPlacement

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input: this rank's columns. Returns all rows of the sum, or this rank's, as `output_layouts` say."""
        return _forward(self, input, "Rowwise", _row_parallel)


@cache
def linear_subclass(kind: type[nn.Linear], owner: type[nn.Linear]) -> type[nn.Linear]:
    """Return the class for a layer of class `owner`, a subclass of `nn.Linear` without a forward of its own."""
    return kind if owner is nn.Linear else type(f"{kind.__name__}Of{owner.__name__}", (kind, owner), {})


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
    """Run a layer by `compute`, or by torch if overweave does not support the call; count which."""
    if torch.compiler.is_compiling():
        return _by_dtensor(layer, x)
    place, weight, bias, counts = layer.overweave_place, layer.weight, layer.bias, SITES.get(name) or site(name)
    reason = _call_obstacle(place, x, weight)
    if reason:
        counts.by_torch[reason] += 1
        return _by_dtensor(layer, x)
    counts.by_overweave += 1
    if x.__class__ is Gathering and hasattr(type(layer), "_get_fsdp_state"):
        x = x.view_as(x)  # FSDP2 frees the weight of a layer that it shards by itself before the gather's gradient
    try:
        if is_transformed():  # asked before torch takes DTensors apart, which says nothing of the layer
            check_untransformed(name, place.group, (x,))
        y: torch.Tensor = compute(place, x, weight, bias)
        return y
    except InputError as error:
        if place.path and place.path not in error.asked:
            raise _naming_layer(place.path, error) from None
        raise


def _column_parallel(place: LayerPlacement, x: Any, weight: Any, bias: Any) -> torch.Tensor:
    if x.__class__ is Gathering and x.group == place.group and x.is_as_given:
        return x.linear(local(weight), local(bias), weight)
    part, size = local_shard(x, place.input_placement)
    if not place.input_placement.is_shard():
        return replicated_linear(part, local(weight), local(bias), place.group)
    size = size if size is not None and size % place.mesh.size() else None
    y: torch.Tensor = all_gather_linear(part, weight, bias, place.mesh, dim=_dim(place.input_placement), size=size)
    return y


def _row_parallel(place: LayerPlacement, x: Any, weight: Any, bias: Any) -> torch.Tensor:
    """Return the sum of products over ranks: all rows, or this rank's."""
    part, _ = local_shard(x, place.input_placement)
    if place.output_placement.is_shard():
        return linear_reduce_scatter(part, local(weight), local(bias), place.group, dim=_dim(place.output_placement))
    y: torch.Tensor = linear_all_reduce(part, local(weight), local(bias), place.group)
    return y


def _call_obstacle(place: LayerPlacement, x: Any, weight: Any) -> str:
    """Return why torch computes a call; empty if overweave does."""
    if not isinstance(weight, DTensor):
        return f"its weight is a {type(weight).__name__}"
    if (
        weight._local_tensor.__class__ not in PLAIN or weight.dtype not in DTYPES
    ):  # asked without a call: every one asks
        return obstacle_of(weight)
    if weight._spec.mesh is not place.mesh and weight._spec.mesh.ndim != 1:
        return "its weight lies on a mesh of several dimensions"
    if isinstance(x, DTensor) and x.device_mesh != place.mesh:
        return "its input lies on another mesh"
    if place.rows is not None and _dim(place.rows) % x.dim() == x.dim() - 1:
        return f"{place.rows} of it is no dimension of rows"
    return ""


def _by_dtensor(layer: Any, x: Any) -> torch.Tensor:
    """Compute as torch's own styles do. A compiler traces this, and fuses its collectives in the graph."""
    _, mesh, _, input_placement, output_placement, matmul_placement, _ = layer.overweave_place
    dtensor = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [input_placement], run_check=False)
    if dtensor.placements != (matmul_placement,):
        dtensor = dtensor.redistribute(placements=[matmul_placement])
    y: Any = nn.functional.linear(dtensor, layer.weight, layer.bias)
    if y.placements != (output_placement,):
        y = y.redistribute(placements=[output_placement])
    result: torch.Tensor = y.to_local()
    return result


def _naming_layer(path: str, error: InputError) -> OverweaveError:
    return type(error)(f"layer {path!r}: {error.asked}", error.found, error.cure)


def _dim(placement: Any) -> int:
    dim: int = placement.dim
    return dim


class Colwise(ColwiseParallel):
    """torch's `ColwiseParallel`: each rank computes its columns. A gather of the input overlaps with the matmul.

    input_layouts: `Replicate()`, or `Shard(dim)` of a dimension of rows, which is gathered at this matmul. Leave it out
    behind `PrepareGather`: layers that read one input share one gather. torch computes what overweave does not support
    (an embedding, a layer whose forward is not `nn.Linear`'s, an output that is not sharded along its last dimension,
    DTensor results), and `overweave.report()` counts it.
    Raises InputError for a layer that has a style already and for widths that ranks do not divide.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
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
    layer that has a style already and for widths that ranks do not divide.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
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
    others reuse the gathered tensor; any other operation gathers it, once, by torch.distributed: `overweave.report()`
    counts both. Its gradient is whole and the same on every rank, as that of torch's `Replicate()`. All ranks read
    it, or none. input_layouts: of the first positional argument, `Shard(dim)`. input_kwarg_layouts: of arguments by
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
            if placement is not None and (not placement.is_shard() or _is_last_dim(placement)):
                cure = "Pass Shard(dim) of a dimension of rows"
                raise InputError("PrepareGather: input_layouts", f"got {placement}", cure)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mesh_and_group, path = (device_mesh, place_of(device_mesh)), _path_of(module)

        def before(
            _: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            layouts = self.input_kwarg_layouts
            # Dynamo of torch 2.10 reads no bool(arguments).
            is_first = len(arguments) > 0 and self.input_layouts is not None
            if not is_first and not any(name in keywords for name in layouts):
                raise self._missing_input(path, arguments, keywords)
            first = [prepare_input(arguments[0], self.input_layouts, mesh_and_group)] if arguments else []
            prepared = {name: prepare_input(x, layouts.get(name), mesh_and_group) for name, x in keywords.items()}
            return (*first, *arguments[1:]), prepared

        module.register_forward_pre_hook(before, with_kwargs=True)
        return module

    def _missing_input(self, path: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> InputError:
        """Return the error of a call without an input that has a layout: the module would compute with own rows."""
        asked = f"gather the input of module {path!r}"
        passed = f"{len(arguments)} arguments by position and {sorted(keywords)} by name"
        found = f"it was called with {passed}, none with a layout"
        return InputError(asked, found, "Name it in input_kwarg_layouts, or, of the first argument, in input_layouts")


def prepare_input(x: object, placement: Any, mesh_and_group: tuple[DeviceMesh, RankPlace]) -> object:
    """Return an input as the module gets it: gathered, or a tensor that is gathered when it is read."""
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
        whole = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [placement], run_check=False)
        whole = whole.redistribute(placements=[Replicate()])
        return whole if is_compiled else whole.to_local()
    if is_transformed():
        check_untransformed("PrepareGather", mesh, (x,))
    shard, size = local_shard(x, placement)
    whole_size = shard.shape[dim] * group.world_size if size is None else size
    return gather_lazily(shard, RowGather(dim, group.name, whole_size))


def _layer_obstacle(module: nn.Module, is_local_output: bool, is_supported: bool) -> str:
    """Return why a layer gets torch's style; empty if it gets overweave's."""
    kind = type(module)
    if not isinstance(module, nn.Linear):
        return f"a layer that is a {kind.__name__}"
    if kind.forward not in (nn.Linear.forward, ColwiseLinear.forward, RowwiseLinear.forward):
        return f"a layer that is a {kind.__name__}, whose forward is its own"
    if "forward" in vars(module):
        return f"a layer that is a {kind.__name__}, whose forward was replaced"
    if not is_local_output:
        return "a layer whose result is a DTensor"
    return "" if is_supported else "a layer with layouts that no operator of overweave has"


def _check_layer(module: Any, mesh: DeviceMesh, dimension_name: str) -> str:
    """Return the layer's path in the model. Raises InputError for a layer with a style, or with an uneven width."""
    path, width, ranks = _path_of(module), getattr(module, dimension_name), place_of(mesh).world_size
    asked = f"a style for the linear layer {path!r}"
    if isinstance(module, (ColwiseLinear, RowwiseLinear)) or isinstance(module.weight, DTensor):
        cure = "Name each layer in one plan only"
        raise InputError(asked, f"it has one already: {type(module).__name__}", cure)
    if width % ranks:
        cure = "Choose a width that does, fewer ranks, or torch's own style"
        raise InputError(f"{asked}: {dimension_name}", f"{width} does not divide by {ranks} ranks", cure)
    return path


def _path_of(module: nn.Module) -> str:
    """Return a layer's name in the outermost model of `parallelize_module`, read from its frame."""
    path, frame = "", sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        if frame.f_code is parallelize_module.__code__:
            names = frame.f_locals["module"].named_modules()
            path = next((name for name, each in names if each is module), path)
    return path


def _change_class(module: nn.Module, kind: type[nn.Linear], place: LayerPlacement) -> nn.Module:
    module.__class__ = linear_subclass(kind, type(module))  # type: ignore[arg-type]
    module.overweave_place = place  # type: ignore[assignment]
    return module


def _is_last_dim(placement: Any) -> bool:
    return bool(placement.is_shard()) and placement.dim == -1
