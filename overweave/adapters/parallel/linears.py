"""The linear layers of a plan: `nn.Linear`s with overweave's forward, whose weights stay DTensors.

A style changes the class of a layer and none of its attributes: state dicts, hooks and optimizers see no difference.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from overweave.adapters.packages import PLAIN, obstacle_of
from overweave.adapters.parallel.gathering import Gathering
from overweave.adapters.report import SITES, site
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
from overweave.ops.dispatch.route import place_of


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
    reason = _reason_unsupported(place, x, weight)
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
    """Return this rank's columns of all rows."""
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


def _reason_unsupported(place: LayerPlacement, x: Any, weight: Any) -> str:
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
    """Return the error with the layer's path in it."""
    return type(error)(f"layer {path!r}: {error.asked}", error.found, error.cure)


def _dim(placement: Any) -> int:
    dim: int = placement.dim
    return dim
